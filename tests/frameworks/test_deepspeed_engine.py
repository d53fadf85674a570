"""DeepSpeed's PipelineEngine itself under pipeproof, in validations and in running jobs: faults are named.

``ci/frameworks`` runs this in an environment that has DeepSpeed; elsewhere it is skipped.
"""

import pytest

pytest.importorskip("deepspeed", reason="deepspeed is not installed: ci/frameworks installs it")

from functools import partial
from typing import Any
from unittest import mock

import deepspeed

import pipeproof
from pipeproof import World
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from pipeproof.worlds.worker import RankContext
from tests.frameworks import pipe_job, shared
from tests.frameworks.deepspeed_faults import FAULTS as FAULTS
from tests.frameworks.deepspeed_faults import step as step
from tests.frameworks.engines import tiny_pipe
from tests.frameworks.engines.deepspeed_layout import DeepSpeedLayout as Layout
from tests.frameworks.engines.tiny_pipe import judged, loss_fn
from tests.frameworks.jobs import assert_its_own, assert_other_data_is_said
from tests.frameworks.pipe_job import job_of

pytestmark = pytest.mark.pipeproof_ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "bitwise": {
        "1f1b": Layout(),
        "one-stage": Layout(pp=1),
        "four-ranks": (Layout(pp=4), 8),
        "few-microbatches": (Layout(pp=4), 2),
        "recompute": Layout(recompute=1),
        "tied": Layout(tied=True),
        "tied-four-ranks": (Layout(pp=4, tied=True), 8),
    },
    # Not to the bit: replicas are added in another order; norms are of other partial sums.
    "fp32": {
        "replicas": Layout(dp=2),
        "clipped-one-stage": Layout(pp=1, clipped=True),
        "zero-1-one-replica": Layout(zero=1),
        "zero-1": Layout(dp=2, zero=1),
        "zero-1-tied-clipped": Layout(dp=2, zero=1, tied=True, clipped=True),
        "bf16-zero-1-summed-in-fp32": Layout(bf16=True, accumulate="fp32", dp=2, zero=1, tied=True),
    },
    "bf16": {
        "bf16": Layout(bf16=True),
        "bf16-tied": Layout(bf16=True, tied=True),
        "bf16-replicas": Layout(bf16=True, dp=2),
        "bf16-zero-1": Layout(bf16=True, dp=2, zero=1, tied=True),
    },
}
LAWS = {
    # Without ZeRO or clipping, no norm is computed in fp32.
    "grad-norm": lambda layout: layout.bf16 or layout.zero > 0 or layout.clipped,
    "shards": lambda layout: layout.zero > 0 and layout.dp > 1 and layout.accumulate == "none",
}
RIGHT = {
    "1f1b": (Layout(), "bitwise"),
    "replicas-tied": (Layout(dp=2, tied=True), "fp32"),
    "zero-1-one-replica-clipped": (Layout(zero=1, clipped=True), "fp32"),
    "zero-1": (Layout(dp=2, zero=1), "fp32"),
    "zero-1-tied-bf16": (Layout(dp=2, zero=1, tied=True, bf16=True), "bf16"),
    "bf16-tied": (Layout(bf16=True, tied=True), "bf16"),
    "bf16-replicas": (Layout(bf16=True, dp=2), "bf16"),
}
FROM_NUMBERS = {  # what the step's numbers alone tell: no messages between stages are observed
    "not-divided": ("scale", "everywhere"),
    "divided-at-each-stage": ("scale", "rank 0, stage 0"),
    "tied-not-reduced": ("tied-not-summed", "parameter tied_modules.words.weight"),
    "not-reduced": ("not-reduced", "stage 0"),
    "other-stream": ("swapped-data", "microbatches 0, 1, 2, 3"),
    "other-buffer": ("swapped-gradients", "rank 0, stage 0, microbatches 2, 3"),
    "summed-over-replicas": ("scale", "everywhere"),
    "not-cleared": ("doubled", "microbatches 0, 1, 2"),
    "clipped-by-one-stage": ("norm", "rank 0"),  # whose gradients alone are in it
}
BY_ITSELF = {
    "not-divided": ("scale", "everywhere"),
    "divided-at-each-stage": ("scale", "rank 0, stage 0"),
    "tied-not-reduced": ("tied-not-summed", "parameter tied_modules.words.weight"),
    "not-reduced": ("not-reduced", "rank 0, stage 0"),
    "other-stream": ("swapped-data", "rank 1, stage 1, microbatches 0, 1, 2, 3"),
    "other-buffer": ("mispaired", "rank 0, stage 0, microbatches 2, 3, action 0B3"),
    "summed-over-replicas": ("scale", "everywhere"),
    "not-cleared": ("doubled", "microbatches 0, 1, 2"),
    "clipped-by-one-stage": ("norm", "rank 1, stage 1"),
}
IN_SHARDS = {
    "other-shard": [
        ("not-reduced", "stage 0, parameter 1.down.weight"),
        ("not-reduced", "stage 1, parameter 4.up.weight"),
    ],
    "not-divided": [("scale", "everywhere")],
    "other-buffer": [("swapped-gradients", "stage 0, microbatches 2, 3, 6, 7")],
}
NAMED = [(None, FROM_NUMBERS), (Layout(dp=2, zero=1), IN_SHARDS)]
ITSELF = dict.fromkeys(RIGHT)
ITSELF_LAWS = {"boundaries", "gradient", "loss"}
test_a_right_layout_passes, test_a_fault_is_named = shared.OF_ENGINES
test_a_right_step_passes, test_a_fault_in_a_job_is_named = shared.OF_JOBS
test_a_step_passes_against_itself, test_a_fault_is_named_against_itself = shared.AGAINST_ITSELF


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


def test_another_number_of_microbatches_than_the_engine_takes_is_said(whitebox: WhiteBox) -> None:
    verdict = judged(Layout(), own_step=fewer_microbatches, whitebox=whitebox)
    assert verdict.outcome == "unknown"
    assert "gradient_accumulation_steps is 3, and the step has 4 microbatches" in verdict.details


def fewer_microbatches(layout: Layout, model: object, microbatches: list[object]) -> None:
    deepspeed.init_distributed()
    with pipeproof.deepspeed.observe(tiny_pipe.made(layout, len(microbatches) - 1), microbatches, model):
        pass


def test_what_the_job_raises_is_its_own_and_other_data_is_no_wrong_step(world: World) -> None:
    assert_its_own(world, job_of, Layout())
    assert_other_data_is_said(world, job_of, Layout())
