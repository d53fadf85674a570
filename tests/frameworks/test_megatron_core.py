"""Megatron-core itself under pipeproof: right layouts pass, planted faults are caught, named and located.

``ci/frameworks`` runs this in an environment that has Megatron-core; elsewhere it is skipped.
"""

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: ci/frameworks installs it")

from functools import partial
from typing import Any

import torch

from pipeproof.whitebox import WhiteBox
from tests.frameworks import megatron_faults
from tests.frameworks.engines.megatron_layout import MegatronLayout as Layout
from tests.frameworks.engines.tiny_gpt import judged
from tests.frameworks.fault import named, passed
from tests.frameworks.megatron_faults import FAULTS

pytestmark = pytest.mark.pipeproof_ranks

BITWISE = {
    "1f1b": (Layout(), 4),
    "one-stage": (Layout(pp=1), 4),
    "four-ranks": (Layout(pp=4), 8),
    "few-microbatches": (Layout(pp=4), 2),
    "interleaved": (Layout(pp=4, vp=2, layers=8), 4),
    "interleaved-overlap": (Layout(vp=2, p2p_overlap=True), 4),
    "interleaved-four-ranks-overlap": (Layout(pp=4, vp=2, layers=8, p2p_overlap=True), 8),
    "loss-of-three": (Layout(three=True), 4),
    "bf16": (Layout(bf16=True), 4),
    "bf16-replicas": (Layout(bf16=True, dp=2), 4),
    "tied": (Layout(tied=True), 4),
    "tied-interleaved": (Layout(vp=2, tied=True, p2p_overlap=True), 4),
}
# Not to the bit: replicas are added, gradients divided by tokens, or norms summed in another order.
ROUNDED = {
    "tied-four-ranks-optimizer": (Layout(pp=4, tied=True, optimizer=True), 4),
    "per-token": (Layout(three=True, per_token=True), 4),
    "replicas": (Layout(dp=2), 4),
    "replicas-per-token": (Layout(dp=2, three=True, per_token=True), 4),
    "replicas-overlap-tied-optimizer": (Layout(dp=2, overlap=True, tied=True, optimizer=True), 4),
    "replicas-interleaved": (Layout(dp=2, vp=2, overlap=True, p2p_overlap=True), 4),
    "distributed-optimizer": (Layout(dp=2, distributed=True, tied=True, optimizer=True, overlap=True), 4),
    "scaled-loss": (Layout(bf16=True, optimizer=True, scaled=True), 4),
    "scaled-loss-shards": (Layout(dp=2, distributed=True, tied=True, optimizer=True, scaled=True), 4),
}


@pytest.mark.parametrize("name", [*BITWISE, *ROUNDED])
def test_a_right_layout_passes(name: str, whitebox: WhiteBox) -> None:
    layout, microbatches = (BITWISE | ROUNDED)[name]
    verdict = judged(layout, microbatches=microbatches, whitebox=whitebox)
    assert verdict.outcome == "pass", str(verdict)
    assert verdict.tier == ("bitwise" if name in BITWISE else "fp32")
    assert passed(verdict) >= {"gradient", "loss", "boundaries"}
    assert (verdict.law("grad-norm").outcome == "pass") == layout.optimizer


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_named_and_located(name: str, whitebox: WhiteBox) -> None:
    fault = FAULTS[name]
    verdict = judged(fault.layout, own_step=partial(megatron_faults.step, name), whitebox=whitebox)
    assert named(verdict) == ("fail", [(fault.kind, place) for place in fault.places]), str(verdict)


@pytest.mark.parametrize(
    ("layout", "outcome"),
    [
        (Layout(optimizer=True), "pass"),
        (Layout(dp=2, distributed=True, tied=True, optimizer=True), "pass"),
        (Layout(optimizer=True, bf16=True), "not observed"),  # of copies in fp32
        (Layout(optimizer=True, second=True), "not observed"),  # the optimizer goes on from the step before
    ],
)
def test_an_update_is_compared_with_one_of_gradients_that_were_clipped_alike(
    layout: Layout, outcome: str, whitebox: WhiteBox
) -> None:
    verdict = judged(layout, optimizer=adam_w, whitebox=whitebox)
    assert verdict.outcome == "pass", str(verdict)
    law = verdict.law("updated-parameters")
    assert law.outcome == outcome, str(verdict)
    assert ("updates are not compared" in law.note) == (outcome != "pass")


def adam_w(model: Any) -> torch.optim.Optimizer:
    """As Megatron makes one: biases do not decay."""
    named = dict(model.named_parameters())
    own = [one for name, one in named.items() if not name.endswith(".bias")]
    biases = [one for name, one in named.items() if name.endswith(".bias")]
    return torch.optim.AdamW([{"params": own}, {"params": biases, "weight_decay": 0.0}], lr=0.1, weight_decay=0.01)
