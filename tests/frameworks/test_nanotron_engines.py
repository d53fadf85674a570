"""Nanotron's engines themselves under pipeproof: right layouts pass, planted faults are caught, named and located.

``ci/frameworks`` runs this in an environment that has nanotron; elsewhere it is skipped.
"""

import pytest

pytest.importorskip("nanotron", reason="nanotron is not installed: ci/frameworks installs it from NANOTRON, a checkout")

from dataclasses import replace
from functools import partial
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

import pipeproof
from pipeproof.whitebox import WhiteBox
from pipeproof.wings.adapters.nanotron import Nanotron
from tests.frameworks import nanotron_faults
from tests.frameworks.fault import named, passed
from tests.frameworks.nanotron_faults import FAULTS
from tests.frameworks.tiny_llama import Layout, Trainer, judged

pytestmark = pytest.mark.pipeproof_ranks

BITWISE = {
    "1f1b": (Layout(clip=None), 4),
    "afab": (Layout(engine="afab", clip=None), 4),
    "one-stage": (Layout(pp=1, clip=None), 4),
    "four-ranks": (Layout(pp=4, clip=None), 8),
    "four-ranks-afab": (Layout(pp=4, engine="afab", clip=None), 4),
    "few-microbatches": (Layout(pp=4, clip=None), 3),
    "recompute-z-loss": (Layout(recompute=True, z_loss=True, clip=None), 3),
    "bf16": (Layout(bf16=True, clip=None), 4),
}
# Not to the bit: norms are of other partial sums, and shares of tied copies or of replicas are added in another order.
FP32 = {
    "clipped": (Layout(), 4),
    "tied": (Layout(tied=True), 4),
    "tied-four-ranks-afab": (Layout(pp=4, engine="afab", tied=True), 8),
    "tied-one-stage": (Layout(pp=1, tied=True), 4),
    "replicas": (Layout(dp=2, ddp=False), 4),
    "replicas-ddp": (Layout(dp=2), 4),
    "replicas-ddp-afab-tied": (Layout(dp=2, engine="afab", tied=True), 4),
    "zero-1": (Layout(dp=2, zero=1), 4),
}
SUMS = Layout(bf16=True, fp32_sums=True)
BF16 = {
    "summed-in-fp32": (SUMS, 4),
    "summed-in-fp32-tied": (replace(SUMS, tied=True), 4),
    "summed-in-fp32-replicas-ddp": (replace(SUMS, dp=2), 4),
    "summed-in-fp32-zero-1-tied": (replace(SUMS, dp=2, ddp=False, zero=1, tied=True), 4),
}
TIERS = {name: tier for tier, names in (("bitwise", BITWISE), ("fp32", FP32), ("bf16", BF16)) for name in names}


@pytest.mark.parametrize("name", TIERS)
def test_a_right_layout_passes(name: str, whitebox: WhiteBox) -> None:
    layout, microbatches = (BITWISE | FP32 | BF16)[name]
    verdict = judged(layout, microbatches=microbatches, whitebox=whitebox)
    assert verdict.outcome == "pass", str(verdict)
    assert verdict.tier == TIERS[name]
    assert passed(verdict) >= {"gradient", "loss", "boundaries"}
    assert ("grad-norm" in passed(verdict)) == (layout.clip is not None)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_named_and_located(name: str, whitebox: WhiteBox) -> None:
    fault = FAULTS[name]
    verdict = judged(fault.layout, own_step=partial(nanotron_faults.step, name), whitebox=whitebox)
    assert named(verdict) == ("fail", [(fault.kind, place) for place in fault.places]), str(verdict)


@pytest.mark.parametrize("zero", [0, 1])
def test_weights_after_the_step_are_compared_too(zero: int, whitebox: WhiteBox) -> None:
    verdict = judged(Layout(dp=2, zero=zero), updated=True, whitebox=whitebox)
    assert verdict.outcome == "pass", str(verdict)
    assert verdict.law("updated-parameters").outcome == "pass"


CLIPPED = Layout(clip=0.05)


def test_an_update_of_gradients_that_were_clipped_is_compared_with_the_same(whitebox: WhiteBox) -> None:
    verdict = judged(CLIPPED, updated=True, whitebox=whitebox)
    assert verdict.outcome == "pass", str(verdict)
    assert verdict.law("updated-parameters").outcome == "pass"
    wrong = judged(CLIPPED, own_step=updated_with_less, updated=True, whitebox=whitebox)
    assert {one.law for one in wrong.mismatches} == {"updated-parameters"}, str(wrong)


def updated_with_less(layout: Layout, model: Any, microbatches: list[Any]) -> Any:
    """The optimizer takes a hundredth of what clipping leaves."""
    trainer = Trainer(layout, len(microbatches))

    def less(*_: Any) -> None:
        for one in trainer.unwrapped_model.parameters():
            one.grad.mul_(0.01)

    with pipeproof.nanotron.observe(trainer, microbatches, model) as observed:
        hook = register_optimizer_step_pre_hook(less)
        trainer.training_step(observed.data_iterator)
        hook.remove()
    return observed.result()


def test_updates_of_copies_in_fp32_are_said_not_to_be_compared(whitebox: WhiteBox) -> None:
    verdict = judged(SUMS, updated=True, whitebox=whitebox)
    assert verdict.outcome == "pass", str(verdict)
    law = verdict.law("updated-parameters")
    assert law.outcome == "not observed"
    assert "not compared where the optimizer has copies of the weights in a wider type" in law.note


@pytest.mark.parametrize("updated", [False, True])
def test_a_step_may_be_trained_before_the_one_that_is_judged(updated: bool, whitebox: WhiteBox) -> None:
    verdict = judged(Layout(), own_step=warmed_up, updated=updated, whitebox=whitebox)
    assert verdict.outcome == "pass", str(verdict)
    assert "initial-weights" in passed(verdict)
    if updated:
        assert "the optimizer had stepped before" in verdict.law("updated-parameters").note


def warmed_up(layout: Layout, model: Any, microbatches: list[Any]) -> Any:
    trainer = Trainer(layout, len(microbatches))
    trainer.training_step(iter([Nanotron(trainer).share_of(one) for one in microbatches[::-1]]))
    with pipeproof.nanotron.observe(trainer, microbatches, model) as observed:
        trainer.training_step(observed.data_iterator)
    return observed.result()


def test_another_number_of_microbatches_than_the_trainer_takes_is_said(whitebox: WhiteBox) -> None:
    verdict = judged(Layout(), own_step=fewer_microbatches, whitebox=whitebox)
    assert verdict.outcome == "unknown"
    assert "batch_accumulation_per_replica is 3, and the step has 4 microbatches" in verdict.details


def fewer_microbatches(layout: Layout, model: Any, microbatches: list[Any]) -> None:
    with pipeproof.nanotron.observe(Trainer(layout, len(microbatches) - 1), microbatches, model):
        raise AssertionError("it is said before")
