"""A step of a running job of DeepSpeed's under pipeproof: right ones pass, faults are named, and the job goes on.

``ci/frameworks`` runs this in an environment that has DeepSpeed; elsewhere it is skipped.
"""

import pytest

pytest.importorskip("deepspeed", reason="deepspeed is not installed: ci/frameworks installs it")

from pipeproof import World
from tests.frameworks import pipe_job
from tests.frameworks.deepspeed_faults import FAULTS
from tests.frameworks.engines.deepspeed_layout import DeepSpeedLayout as Layout
from tests.frameworks.fault import named, passed

RIGHT = {
    "1f1b": (Layout(), "bitwise"),
    "replicas-tied": (Layout(dp=2, tied=True), "fp32"),
    "zero-1-one-replica-clipped": (Layout(zero=1, clipped=True), "fp32"),
    "zero-1": (Layout(dp=2, zero=1), "fp32"),
    "zero-1-tied-bf16": (Layout(dp=2, zero=1, tied=True, bf16=True), "bf16"),
    "bf16-tied": (Layout(bf16=True, tied=True), "bf16"),
    "bf16-replicas": (Layout(bf16=True, dp=2), "bf16"),
}
NAMED = {  # what the step's numbers alone tell: no messages between stages are seen
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


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_passes_and_the_job_is_as_without_a_check(name: str, world: World) -> None:
    layout, tier = RIGHT[name]
    for verdict, harmed in world.run(pipe_job.checked_and_unchecked, layout, ranks=layout.pp * layout.dp):
        assert (verdict.verdict, verdict.tier) == ("pass", tier), str(verdict)
        assert passed(verdict) >= {"gradient", "loss", "parameters-once"}
        assert (verdict.law("grad-norm").outcome == "pass") == (layout.bf16 or layout.zero > 0)
        assert harmed == []


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("name", NAMED)
def test_a_fault_in_a_job_is_caught_and_named(name: str, world: World) -> None:
    layout, (kind, place) = FAULTS[name].layout, NAMED[name]
    for verdict in world.run(pipe_job.checked, layout, name, ranks=layout.pp * layout.dp):
        outcome, causes = named(verdict)
        assert (outcome, causes[:1]) == ("fail", [(kind, place)]), str(verdict)


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_that_is_held_against_itself_passes(name: str, world: World) -> None:
    layout, _ = RIGHT[name]
    for verdict, harmed in world.run(pipe_job.checked_and_unchecked, layout, True, ranks=layout.pp * layout.dp):
        assert verdict.verdict == "pass", str(verdict)
        assert passed(verdict) >= {"boundaries", "gradient", "loss"}
        assert harmed == []


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


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("name", BY_ITSELF)
def test_a_fault_in_a_step_that_is_held_against_itself_is_named(name: str, world: World) -> None:
    layout = FAULTS[name].layout
    for verdict in world.run(pipe_job.checked, layout, name, True, ranks=layout.pp * layout.dp):
        outcome, causes = named(verdict)
        assert (outcome, causes[:1]) == ("fail", [BY_ITSELF[name]]), str(verdict)


IN_SHARDS = {
    "other-shard": [
        ("not-reduced", "stage 0, parameter 1.down.weight"),
        ("not-reduced", "stage 1, parameter 4.up.weight"),
    ],
    "not-divided": [("scale", "everywhere")],
    "other-buffer": [("swapped-gradients", "stage 0, microbatches 2, 3, 6, 7")],
}


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("name", IN_SHARDS)
def test_a_fault_in_a_job_with_zero_1_is_caught_and_named(name: str, world: World) -> None:
    for verdict in world.run(pipe_job.checked, Layout(dp=2, zero=1), name, ranks=4):
        assert named(verdict) == ("fail", IN_SHARDS[name]), str(verdict)


@pytest.mark.pipeproof_ranks
def test_what_the_job_raises_is_its_own(world: World) -> None:
    for raised, verdict, clean in world.run(pipe_job.ended_early, Layout(), ranks=2):
        assert (raised, clean) == ('KeyError("the job\'s own")', True)
        assert verdict.startswith("ERROR rank 0 raised KeyError")


@pytest.mark.pipeproof_ranks
def test_a_step_of_other_data_than_was_given_is_no_wrong_step(world: World) -> None:
    for verdict in world.run(pipe_job.drew_others, Layout(), ranks=2):
        assert verdict.verdict == "unknown", str(verdict)
        assert "the job drew data that is in none of the microbatches given to the check" in verdict.details
