"""DeepSpeed's PipelineEngine itself under pipeproof: right layouts pass, planted faults are caught, named and located.

``ci/frameworks`` runs this in an environment that has DeepSpeed; elsewhere it is skipped.
"""

import pytest

pytest.importorskip("deepspeed", reason="deepspeed is not installed: ci/frameworks installs it")

from functools import partial
from typing import Any
from unittest import mock

import pipeproof
from pipeproof import World
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from pipeproof.worlds.worker import RankContext
from tests.frameworks import deepspeed_faults, pipe_job
from tests.frameworks.deepspeed_faults import FAULTS
from tests.frameworks.engines import tiny_pipe
from tests.frameworks.engines.deepspeed_layout import DeepSpeedLayout as Layout
from tests.frameworks.engines.tiny_pipe import judged, loss_fn
from tests.frameworks.fault import named, passed

pytestmark = pytest.mark.pipeproof_ranks

BITWISE = {
    "1f1b": (Layout(), 4),
    "one-stage": (Layout(pp=1), 4),
    "four-ranks": (Layout(pp=4), 8),
    "few-microbatches": (Layout(pp=4), 2),
    "recompute": (Layout(recompute=1), 4),
    "tied": (Layout(tied=True), 4),
    "tied-four-ranks": (Layout(pp=4, tied=True), 8),
}
# Not to the bit: replicas are added in another order; norms are of other partial sums.
FP32 = {
    "replicas": (Layout(dp=2), 4),
    "clipped-one-stage": (Layout(pp=1, clipped=True), 4),
    "zero-1-one-replica": (Layout(zero=1), 4),
    "zero-1": (Layout(dp=2, zero=1), 4),
    "zero-1-tied-clipped": (Layout(dp=2, zero=1, tied=True, clipped=True), 4),
    "bf16-zero-1-summed-in-fp32": (Layout(bf16=True, accumulate="fp32", dp=2, zero=1, tied=True), 4),
}
BF16 = {
    "bf16": (Layout(bf16=True), 4),
    "bf16-tied": (Layout(bf16=True, tied=True), 4),
    "bf16-replicas": (Layout(bf16=True, dp=2), 4),
    "bf16-zero-1": (Layout(bf16=True, dp=2, zero=1, tied=True), 4),
}
TIERS = {name: tier for tier, names in (("bitwise", BITWISE), ("fp32", FP32), ("bf16", BF16)) for name in names}


@pytest.mark.parametrize("name", TIERS)
def test_a_right_layout_passes(name: str, whitebox: WhiteBox) -> None:
    layout, microbatches = (BITWISE | FP32 | BF16)[name]
    verdict = judged(layout, microbatches=microbatches, whitebox=whitebox)
    assert verdict.outcome == "pass", str(verdict)
    assert verdict.tier == TIERS[name]
    assert passed(verdict) >= {"gradient", "loss", "boundaries"}
    # Without ZeRO or clipping, no norm is computed in fp32.
    assert ("grad-norm" in passed(verdict)) == (layout.bf16 or layout.zero > 0 or layout.clipped)
    assert ("shards" in passed(verdict)) == (layout.zero > 0 and layout.dp > 1 and layout.accumulate == "none")


def of_pairs(output: Any, labels: Any) -> Any:
    """The loss of words and of others, which labels have both."""
    right, other = labels
    return (loss_fn(output, right) + loss_fn(output, other)) / 2


def step_of_pairs(layout: Layout, model: Any, microbatches: list[Any]) -> Any:
    with mock.patch.object(tiny_pipe, "loss_fn", of_pairs):
        return tiny_pipe.step(layout, model, microbatches)


def checked_of_pairs(_: RankContext, layout: Layout) -> Verdict:
    with mock.patch.object(tiny_pipe, "loss_fn", of_pairs), pipe_job.job_of(layout) as job:
        microbatches = [(words, (labels, words)) for words, labels in job.data]
        with pipe_job.check_of(job.made, microbatches, layout) as check:
            job.train(microbatches)
        return check.verdict


def test_labels_of_several_tensors_serve_validate_and_check_step_alike(whitebox: WhiteBox, world: World) -> None:
    verdict = pipeproof.deepspeed.validate(
        partial(step_of_pairs, Layout()),
        reference=partial(tiny_pipe.layers, Layout()),
        microbatches=[(words, (labels, words)) for words, labels in tiny_pipe.data_of(4)],
        ranks=2,
        loss_fn=of_pairs,
        whitebox=whitebox,
    )
    assert (verdict.outcome, verdict.tier) == ("pass", "bitwise"), str(verdict)
    for verdict in world.run(checked_of_pairs, Layout(), ranks=2):
        assert (verdict.outcome, verdict.tier) == ("pass", "bitwise"), str(verdict)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_named_and_located(name: str, whitebox: WhiteBox) -> None:
    fault = FAULTS[name]
    verdict = judged(fault.layout, own_step=partial(deepspeed_faults.step, name), whitebox=whitebox)
    assert named(verdict) == ("fail", [(fault.kind, place) for place in fault.places]), str(verdict)


def test_another_number_of_microbatches_than_the_engine_takes_is_said(whitebox: WhiteBox) -> None:
    verdict = judged(Layout(), own_step=fewer_microbatches, whitebox=whitebox)
    assert verdict.outcome == "unknown"
    assert "gradient_accumulation_steps is 3, and the step has 4 microbatches" in verdict.details


def fewer_microbatches(layout: Layout, model: object, microbatches: list[object]) -> None:
    import deepspeed

    import pipeproof
    from tests.frameworks.engines.tiny_pipe import made

    deepspeed.init_distributed()
    with pipeproof.deepspeed.observe(made(layout, len(microbatches) - 1), microbatches, model):
        pass
