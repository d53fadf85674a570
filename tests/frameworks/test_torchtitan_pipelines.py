"""Torchtitan's own pipelines under pipeproof: right layouts pass, planted faults are caught, named and located.

``ci/frameworks`` runs this in an environment that has torchtitan; elsewhere it is skipped.
"""

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: ci/frameworks installs it")

from functools import partial

from pipeproof.whitebox import WhiteBox
from tests.frameworks import torchtitan_faults
from tests.frameworks.engines.tiny_titan import judged
from tests.frameworks.engines.torchtitan_layout import TorchtitanLayout as Layout
from tests.frameworks.fault import named, passed
from tests.frameworks.torchtitan_faults import FAULTS

pytestmark = pytest.mark.pipeproof_ranks

BITWISE = {
    "1f1b": (Layout(), 4),
    "interleaved": (Layout(schedule="Interleaved1F1B", vp=2), 4),
    "zb-v": (Layout(schedule="ZBVZeroBubble", vp=2), 4),
    "zb-v in bf16": (Layout(schedule="ZBVZeroBubble", vp=2, bf16=True), 8),
    "zb-h1 in bf16 and shards": (Layout(schedule="InterleavedZeroBubble", vp=2, dp=2, bf16=True), 16),
}
# Not to the bit: norms are of other partial sums; replicas add in another order.
FP32 = {
    "clipped": (Layout(clipped=True), 4),
    "fsdp": (Layout(dp=2), 8),
    "replicated": (Layout(dp=2, replicate=2), 8),
}


@pytest.mark.parametrize("name", BITWISE | FP32)
def test_a_right_layout_passes(name: str, whitebox: WhiteBox) -> None:
    layout, microbatches = (BITWISE | FP32)[name]
    verdict = judged(layout, microbatches=microbatches, whitebox=whitebox)
    assert verdict.outcome == "pass", str(verdict)
    assert verdict.tier == ("bitwise" if name in BITWISE else "fp32")
    assert passed(verdict) >= {"gradient", "loss", "boundaries", "initial-weights", "shards"}
    assert ("grad-norm" in passed(verdict)) == layout.clipped


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_named_and_located(name: str, whitebox: WhiteBox) -> None:
    fault = FAULTS[name]
    verdict = judged(fault.layout, own_step=partial(torchtitan_faults.step, name), whitebox=whitebox)
    assert named(verdict) == ("fail", [(fault.kind, place) for place in fault.places]), str(verdict)


def test_positions_that_come_to_the_first_stage_alone_are_caught_without_a_name(whitebox: WhiteBox) -> None:
    verdict = judged(Layout(), own_step=partial(torchtitan_faults.step, "positions-lost"), whitebox=whitebox)
    assert verdict.outcome == "fail", str(verdict)
    assert "rank 1, stage 1, parameter model.layers.2" in verdict.details
