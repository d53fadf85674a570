"""Nanotron's engines themselves under pipeproof, in validations and in running jobs: faults are named.

``ci/frameworks`` runs this in an environment that has nanotron; elsewhere it is skipped.
"""

import pytest

pytest.importorskip("nanotron", reason="nanotron is not installed: ci/frameworks installs it from NANOTRON, a checkout")

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

import pipeproof
from pipeproof import World
from pipeproof.records.compare import compare
from pipeproof.records.record_file import read
from pipeproof.whitebox import WhiteBox
from pipeproof.wings.adapters.nanotron import Nanotron
from tests.frameworks import llama_job, shared
from tests.frameworks.fault import named, passed
from tests.frameworks.jobs import recorded
from tests.frameworks.llama_job import job_of
from tests.frameworks.nanotron_faults import FAULTS as FAULTS
from tests.frameworks.nanotron_faults import SUMS, TIED
from tests.frameworks.nanotron_faults import step as step
from tests.frameworks.tiny_llama import Layout, Trainer, judged

pytestmark = pytest.mark.pipeproof_ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "bitwise": {
        "1f1b": Layout(clip=None),
        "afab": Layout(engine="afab", clip=None),
        "one-stage": Layout(pp=1, clip=None),
        "four-ranks": (Layout(pp=4, clip=None), 8),
        "four-ranks-afab": Layout(pp=4, engine="afab", clip=None),
        "few-microbatches": (Layout(pp=4, clip=None), 3),
        "recompute-z-loss": (Layout(recompute=True, z_loss=True, clip=None), 3),
        "bf16": Layout(bf16=True, clip=None),
    },
    # Not to the bit: norms are of other partial sums; shares of tied copies or of replicas are added in another order.
    "fp32": {
        "clipped": Layout(),
        "tied": Layout(tied=True),
        "tied-four-ranks-afab": (Layout(pp=4, engine="afab", tied=True), 8),
        "tied-one-stage": Layout(pp=1, tied=True),
        "replicas": Layout(dp=2, ddp=False),
        "replicas-ddp": Layout(dp=2),
        "replicas-ddp-afab-tied": Layout(dp=2, engine="afab", tied=True),
        "zero-1": Layout(dp=2, zero=1),
    },
    "bf16": {
        "summed-in-fp32": SUMS,
        "summed-in-fp32-tied": replace(SUMS, tied=True),
        "summed-in-fp32-replicas-ddp": replace(SUMS, dp=2),
        "summed-in-fp32-zero-1-tied": replace(SUMS, dp=2, ddp=False, zero=1, tied=True),
    },
}
LAWS = {"grad-norm": lambda layout: layout.clip is not None}
RIGHT = {
    "1f1b": (Layout(), "fp32"),
    "afab-tied": (Layout(engine="afab", tied=True), "fp32"),
    "summed-in-fp32": (SUMS, "bf16"),
    "replicas-ddp-tied-zero-1": (Layout(dp=2, zero=1, tied=True), "fp32"),
    "unclipped": (Layout(clip=None), "bitwise"),
}
NAMED = {  # what the step's numbers alone tell: no messages between stages are observed
    "not-divided": ("scale", "everywhere"),
    "tied-not-synced": ("tied-not-summed", *TIED),
    "tied-averaged": ("scale", *TIED),
    "replicas-not-synced": ("not-reduced", "stage 0"),
    "replicas-summed": ("scale", "everywhere"),
    "norm-of-one-stage": ("norm", "everywhere"),
    "norm-counts-copies": ("norm", "everywhere"),
    "last-in-first-out": ("swapped-gradients", "rank 0, stage 0, microbatches 0, 1, 2, 3"),
    "half-kept": ("doubled", "microbatches 0, 1, 2"),
}
test_a_right_layout_passes, test_a_fault_is_named = shared.OF_ENGINES
test_a_right_step_passes, test_a_fault_in_a_job_is_named = shared.OF_JOBS


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


def test_what_afab_keeps_of_a_step_that_raised_is_found_in_the_next(world: World) -> None:
    """Nothing is planted: nanotron's queues are of the class, and outlive a step."""
    for verdict in world.run(llama_job.tried_again, Layout(engine="afab"), ranks=2):
        assert named(verdict) == ("fail", [("doubled", "microbatches 0, 1")]), str(verdict)


def test_gradients_that_were_not_cleared_are_found_in_the_next_step(world: World) -> None:
    for verdict in world.run(llama_job.not_cleared, SUMS, ranks=2):
        assert verdict.outcome == "fail", str(verdict)
        assert [cause.kind for cause in verdict.causes] == ["stale-gradient"], str(verdict)


def test_what_is_no_trainer_is_said_and_the_job_goes_on(world: World) -> None:
    for said, trained in world.run(llama_job.refused, Layout(), ranks=2):
        assert "the trainer is a str without model: expected nanotron's DistributedTrainer" in said
        assert trained


def test_two_recorded_steps_are_compared(world: World, tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.safetensors" for name in ("1f1b", "afab")]
    for path in paths:
        world.run(recorded, job_of, Layout(engine=path.stem), str(path), ranks=2)
    verdict = compare(*map(read, map(str, paths)))
    assert verdict.outcome == "pass", str(verdict)
