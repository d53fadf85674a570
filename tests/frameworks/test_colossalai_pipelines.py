"""ColossalAI's pipelines themselves under pipeproof, in validations and in running jobs: faults are named.

``ci/frameworks`` runs this in an environment that has ColossalAI; elsewhere it is skipped.
"""

import pytest

pytest.importorskip("colossalai", reason="colossalai is not installed: ci/frameworks installs it")

from operator import attrgetter
from pathlib import Path
from typing import Any

import pipeproof
from pipeproof import World
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from tests.frameworks import boosted_job, shared
from tests.frameworks.boosted_job import job_of
from tests.frameworks.colossalai_faults import FAULTS as FAULTS
from tests.frameworks.colossalai_faults import step as step
from tests.frameworks.fault import named, passed
from tests.frameworks.jobs import assert_its_own, assert_other_data_is_said, compared, recorded
from tests.frameworks.tiny_colossal import Layout, judged, made

pytestmark = pytest.mark.pipeproof_ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    # To the bit, but for norms, which are added in another order: these are not computed here.
    "bitwise": {
        "1f1b": Layout(clipped=False),
        "1f1b-four-ranks": (Layout(pp=4, clipped=False), 8),
        "1f1b-uncached": Layout(cached=False, clipped=False),
        "1f1b-tied": Layout(tied=True, clipped=False),
        "1f1b-unequal-stages": (Layout(layers=7, clipped=False), 3),
        "interleaved": Layout("interleaved", chunks=2, clipped=False),
        "interleaved-three-chunks": (Layout("interleaved", chunks=3, layers=6, clipped=False), 6),
        "interleaved-four-ranks": (Layout("interleaved", pp=4, chunks=2, clipped=False), 8),
        "zbv": Layout("zbv", chunks=2, clipped=False),
        "zbv-four-ranks": (Layout("zbv", pp=4, chunks=2, clipped=False), 8),
    },
    "fp32": {
        "clipped": Layout(),
        "tied-four-ranks": (Layout(pp=4, tied=True), 8),
        "interleaved-tied": Layout("interleaved", chunks=2, tied=True),
        "zbv-tied": Layout("zbv", chunks=2, tied=True),
        "replicas": Layout(dp=2),
        "replicas-tied": Layout(dp=2, tied=True),
        "replicas-interleaved": (Layout("interleaved", chunks=2, dp=2), 2),
    },
    "bf16": {
        "bf16": Layout(bf16=True),
        "bf16-replicas-tied": (Layout(bf16=True, dp=2, tied=True), 2),
        "zero-1-one-replica": Layout(bf16=True, zero=1),
        "zero-1-tied": (Layout(bf16=True, zero=1, dp=2, tied=True), 2),
        "zero-1-interleaved-tied": (Layout("interleaved", chunks=2, bf16=True, zero=1, dp=2, tied=True), 2),
    },
}
LAWS = {
    **dict.fromkeys(("microbatches", "initial-weights", "parameters-once"), lambda _: True),
    "grad-norm": attrgetter("clipped"),
    "tied-copies": attrgetter("tied"),
    "shards": lambda layout: layout.zero > 0 and layout.dp > 1,
}
RIGHT = {
    "1f1b": (Layout(clipped=False), "bitwise"),
    "tied-clipped": (Layout(tied=True), "fp32"),
    "interleaved": (Layout("interleaved", chunks=2), "fp32"),
    "replicas-tied": (Layout(dp=2, tied=True), "fp32"),
    "replicas-as-neighbours": (Layout(dp=2, dp_outside=False), "fp32"),
    "bf16-tied": (Layout(bf16=True, tied=True), "bf16"),
    "zero-1-one-replica": (Layout(bf16=True, zero=1), "bf16"),
    "zero-1": (Layout(bf16=True, zero=1, dp=2, tied=True), "bf16"),
}
NAMED = {  # what the step's numbers alone tell: no messages between stages are observed
    "not-divided": ("scale", "everywhere"),
    "divided-at-each-stage": ("scale", "rank 0, stage 0"),
    "tied-not-summed": ("tied-not-summed", "parameter model.words.weight"),
    "not-reduced": ("not-reduced", "stage 0"),
    "summed-over-replicas": ("scale", "everywhere"),
    "other-labels": ("swapped-data", "microbatches 0, 1, 2, 3"),
    "other-stream": ("swapped-data", "microbatches 0, 1, 2, 3"),
    "stale-buffer": ("swapped-activations", "rank 1, stage 1, microbatch 2"),
    "stale-gradient": ("swapped-gradients", "rank 0, stage 0, microbatch 1"),
    "last-in-first-out": ("swapped-gradients", "rank 0, stage 0, microbatches 0, 1, 2, 3"),
    "other-chunk": ("missing", "rank 1, stage 1"),
    "norm-of-one-stage": ("norm", "everywhere"),
    "copies-counted": ("norm", "everywhere"),
    "other-shard": ("misplaced", "rank 0, stage 0, parameter model.words.weight"),
}
BY_ITSELF = {  # messages between stages are observed
    "not-divided": ("scale", "everywhere"),
    "tied-not-summed": ("tied-not-summed", "parameter model.words.weight"),
    "not-reduced": ("not-reduced", "rank 0, stage 0"),
    "other-labels": ("swapped-data", "rank 1, stage 1, microbatches 0, 1, 2, 3"),
    "stale-buffer": ("mispaired", "rank 1, stage 1, microbatch 2, action 1F2"),
    "last-in-first-out": ("mispaired", "rank 0, stage 0, microbatches 0, 1, 2, 3, action 0B1"),
    "copies-counted": ("norm", "everywhere"),
}
ITSELF = {"1f1b": "bitwise", "interleaved": "fp32", "bf16-tied": "bf16", "zero-1": "bf16"}
ITSELF_LAWS = {"microbatches", "boundaries", "gradient", "loss"}
test_a_right_layout_passes, test_a_fault_is_named = shared.OF_ENGINES
test_a_right_step_passes, test_a_fault_in_a_job_is_named = shared.OF_JOBS
test_a_step_passes_against_itself, test_a_fault_is_named_against_itself = shared.AGAINST_ITSELF


def also(verdict: Verdict, layout: Layout) -> None:
    """Each of the stages was observed, also of those that share a module: order and mode of both ways."""
    assert verdict.law("microbatches").checked == 4 * layout.pp * layout.chunks


def test_another_number_of_microbatches_than_the_plugin_cuts_is_said(whitebox: WhiteBox) -> None:
    verdict = judged(Layout(), own_step=fewer_microbatches, whitebox=whitebox)
    assert verdict.outcome == "unknown"
    assert (
        "the plugin's num_microbatches is 3, and the step has 4 microbatches: let both be the same" in verdict.details
    )


def fewer_microbatches(layout: Layout, model: object, microbatches: list[object]) -> None:
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


def test_weights_that_stages_share_are_known_by_the_names_of_a_model(world: World) -> None:
    for verdict in world.run(boosted_job.without_names, Layout(tied=True), ranks=2):
        assert verdict.outcome == "unknown"
        assert "nothing tells by which names: give StageByStage a build=" in verdict.details


RECORDED = {
    "1f1b": (Layout(), "fp32"),
    "not-clipped": (Layout(clipped=False), "bitwise"),
    "interleaved-tied": (Layout("interleaved", chunks=2, tied=True), "fp32"),
}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_step_is_that_of_one_device(name: str, world: World, tmp_path: Path) -> None:
    layout, tier = RECORDED[name]
    verdict = compared(world, job_of, layout, tmp_path, boosted_job.expected(layout))
    assert (verdict.outcome, verdict.tier) == ("pass", tier), str(verdict)
    assert passed(verdict) >= {"gradient", "loss", "parameters-once", "grad-norm" if layout.clipped else "gradient"}
    assert verdict.law("updated-parameters").outcome == "pass"


def test_a_recorded_step_of_replicas_in_bf16_is_undecided(world: World, tmp_path: Path) -> None:
    """One device knows of no replicas, which reduce their sums: in bf16 that may hide a lost microbatch."""
    layout = Layout(zero=1, dp=2, bf16=True)
    verdict = compared(world, job_of, layout, tmp_path, boosted_job.expected(layout))
    assert (verdict.outcome, verdict.law("gradient").outcome) == ("unknown", "unknown"), str(verdict)
    assert passed(verdict) >= {"loss", "parameters-once", "presence", "grad-norm"}


def test_a_fault_in_a_recorded_step_is_named(world: World, tmp_path: Path) -> None:
    verdict = compared(world, job_of, Layout(), tmp_path, boosted_job.expected(Layout()), "not-divided")
    assert named(verdict) == ("fail", [("scale", "everywhere")])


@pytest.mark.filterwarnings("ignore:the step was not recorded")
def test_replicas_that_differ_are_no_record_and_the_job_goes_on(world: World, tmp_path: Path) -> None:
    path = tmp_path / "step.safetensors"
    for problem in world.run(recorded, job_of, Layout(dp=2), str(path), "not-reduced", ranks=4):
        assert "have another gradient of words.weight: a record has one; check_step tells which" in problem
    assert not path.exists()


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2), Layout("interleaved", chunks=2, tied=True)], ids=str)
def test_gradients_of_two_batches_are_added(layout: Layout, world: World) -> None:
    for verdict in world.run(boosted_job.accumulated, layout, True, ranks=layout.pp * layout.dp):
        assert verdict.outcome == "pass", str(verdict)
        assert verdict.law("loss").checked == 8 * layout.dp


def test_colossalai_counts_tied_gradients_of_the_first_batch_twice(world: World) -> None:
    """As it is: without ``no_sync`` what the stages' sum was already is summed over them again with the next batch."""
    for verdict in world.run(boosted_job.accumulated, Layout(tied=True), False, ranks=2):
        assert verdict.outcome == "fail", str(verdict)
        wrong = {m.parameter for m in verdict.mismatches if m.law == "gradient"}
        assert wrong == {"model.words.weight", "model.head.weight"}


REFUSED = {
    "twice": "execute_pipeline was called 2 times before optimizer.step, and the check was given 1 batch",
    "no step": "optimizer.step was not called in the block",
    "empty": "batches is empty: expected at least one",
    "criterion": "criterion is 'mse': expected a function of what the model gives and the microbatch",
    "reference": "reference is a Tiny: expected a function that builds it",
    "ragged": "the batch has 7 rows: expected what is cut into 4 microbatches of equal sizes",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_covered_is_said_and_the_job_goes_on(kind: str, world: World) -> None:
    for verdict, trained in world.run(boosted_job.refused, Layout(), kind, ranks=2):
        assert verdict.startswith("UNKNOWN")
        assert REFUSED[kind] in verdict
        assert trained == (kind != "no step")


def test_what_the_job_raises_is_its_own_and_other_data_is_no_wrong_step(world: World) -> None:
    assert_its_own(world, job_of, Layout())
    assert_other_data_is_said(world, job_of, Layout())
