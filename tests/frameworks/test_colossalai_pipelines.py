"""ColossalAI's pipelines themselves under pipeproof: right layouts pass, planted faults are caught, named and located.

``ci/frameworks`` runs this in an environment that has ColossalAI; elsewhere it is skipped.
"""

import pytest

pytest.importorskip("colossalai", reason="colossalai is not installed: ci/frameworks installs it")

from functools import partial

from pipeproof.whitebox import WhiteBox
from tests.frameworks import colossalai_faults
from tests.frameworks.colossalai_faults import FAULTS
from tests.frameworks.fault import named, passed
from tests.frameworks.tiny_colossal import Layout, judged

pytestmark = pytest.mark.pipeproof_ranks

# To the bit, but for norms, which are added in another order: these are not computed here.
BITWISE = {
    "1f1b": (Layout(clipped=False), 4),
    "1f1b-four-ranks": (Layout(pp=4, clipped=False), 8),
    "1f1b-uncached": (Layout(cached=False, clipped=False), 4),
    "1f1b-tied": (Layout(tied=True, clipped=False), 4),
    "1f1b-unequal-stages": (Layout(layers=7, clipped=False), 3),
    "interleaved": (Layout("interleaved", chunks=2, clipped=False), 4),
    "interleaved-three-chunks": (Layout("interleaved", chunks=3, layers=6, clipped=False), 6),
    "interleaved-four-ranks": (Layout("interleaved", pp=4, chunks=2, clipped=False), 8),
    "zbv": (Layout("zbv", chunks=2, clipped=False), 4),
    "zbv-four-ranks": (Layout("zbv", pp=4, chunks=2, clipped=False), 8),
}
FP32 = {
    "clipped": (Layout(), 4),
    "tied-four-ranks": (Layout(pp=4, tied=True), 8),
    "interleaved-tied": (Layout("interleaved", chunks=2, tied=True), 4),
    "zbv-tied": (Layout("zbv", chunks=2, tied=True), 4),
    "replicas": (Layout(dp=2), 4),
    "replicas-tied": (Layout(dp=2, tied=True), 4),
    "replicas-interleaved": (Layout("interleaved", chunks=2, dp=2), 2),
}
BF16 = {
    "bf16": (Layout(bf16=True), 4),
    "bf16-replicas-tied": (Layout(bf16=True, dp=2, tied=True), 2),
    "zero-1-one-replica": (Layout(bf16=True, zero=1), 4),
    "zero-1-tied": (Layout(bf16=True, zero=1, dp=2, tied=True), 2),
    "zero-1-interleaved-tied": (Layout("interleaved", chunks=2, bf16=True, zero=1, dp=2, tied=True), 2),
}
TIERS = {name: tier for tier, names in (("bitwise", BITWISE), ("fp32", FP32), ("bf16", BF16)) for name in names}


@pytest.mark.parametrize("name", TIERS)
def test_a_right_layout_passes(name: str, whitebox: WhiteBox) -> None:
    layout, microbatches = (BITWISE | FP32 | BF16)[name]
    verdict = judged(layout, microbatches=microbatches, whitebox=whitebox)
    assert verdict.outcome == "pass", str(verdict)
    assert verdict.tier == TIERS[name]
    assert passed(verdict) >= {"gradient", "loss", "boundaries", "microbatches", "initial-weights", "parameters-once"}
    assert ("grad-norm" in passed(verdict)) == layout.clipped
    assert ("tied-copies" in passed(verdict)) == layout.tied
    assert ("shards" in passed(verdict)) == (layout.zero > 0 and layout.dp > 1)
    # Each of the stages was observed, also of those that share a module: order and mode of both ways.
    assert verdict.law("microbatches").checked == 4 * layout.pp * layout.chunks


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_named_and_located(name: str, whitebox: WhiteBox) -> None:
    fault = FAULTS[name]
    own_step = partial(colossalai_faults.step, name)
    verdict = judged(fault.layout, microbatches=fault.layout.microbatches, own_step=own_step, whitebox=whitebox)
    assert named(verdict) == ("fail", [(fault.kind, place) for place in fault.places]), str(verdict)


def test_another_number_of_microbatches_than_the_plugin_cuts_is_said(whitebox: WhiteBox) -> None:
    verdict = judged(Layout(), own_step=fewer_microbatches, whitebox=whitebox)
    assert verdict.outcome == "unknown"
    assert (
        "the plugin's num_microbatches is 3, and the step has 4 microbatches: let both be the same" in verdict.details
    )


def fewer_microbatches(layout: Layout, model: object, microbatches: list[object]) -> None:
    import pipeproof
    from tests.frameworks.tiny_colossal import made

    with pipeproof.colossalai.observe(*made(layout, len(microbatches) - 1), microbatches, model):
        pass


def test_ranks_of_a_stage_that_are_neighbours_are_refused(whitebox: WhiteBox) -> None:
    verdict = judged(Layout(dp=2, dp_outside=False), whitebox=whitebox)
    assert verdict.outcome == "unknown"
    assert "dp_outside is False: pipeproof.colossalai.validate covers True only, the default" in verdict.details


def test_a_model_in_bf16_beside_a_reference_in_fp32_is_said(whitebox: WhiteBox) -> None:
    verdict = judged(Layout(bf16=True), dtype=None, whitebox=whitebox)
    assert verdict.outcome == "unknown"
    assert "the model is boosted to torch.bfloat16, the reference in torch.float32: pass dtype=" in verdict.details
