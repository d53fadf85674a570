"""A step of a running job of DeepSpeed's under pipeproof: right ones pass, faults are named, and the job goes on.

``ci/frameworks`` runs this in an environment that has DeepSpeed; elsewhere it is skipped.
"""

import pytest

pytest.importorskip("deepspeed", reason="deepspeed is not installed: ci/frameworks installs it")

from pipeproof import World
from tests.frameworks.deepspeed_faults import FAULTS
from tests.frameworks.engines.deepspeed_layout import DeepSpeedLayout as Layout
from tests.frameworks.jobs import assert_its_own, assert_named, assert_other_data_is_said, assert_right
from tests.frameworks.pipe_job import job_of

pytestmark = pytest.mark.pipeproof_ranks

RIGHT = {
    "1f1b": (Layout(), "bitwise"),
    "replicas-tied": (Layout(dp=2, tied=True), "fp32"),
    "zero-1-one-replica-clipped": (Layout(zero=1, clipped=True), "fp32"),
    "zero-1": (Layout(dp=2, zero=1), "fp32"),
    "zero-1-tied-bf16": (Layout(dp=2, zero=1, tied=True, bf16=True), "bf16"),
    "bf16-tied": (Layout(bf16=True, tied=True), "bf16"),
    "bf16-replicas": (Layout(bf16=True, dp=2), "bf16"),
}
NAMED = {  # what the step's numbers alone tell: no messages between stages are observed
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


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_passes_and_the_job_is_as_without_a_check(name: str, world: World) -> None:
    layout, tier = RIGHT[name]
    norm = {"grad-norm"} if layout.bf16 or layout.zero else set()  # elsewhere the engine has none
    assert_right(world, job_of, layout, tier, {"gradient", "loss", "parameters-once"} | norm)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_that_is_held_against_itself_passes(name: str, world: World) -> None:
    assert_right(world, job_of, RIGHT[name][0], None, {"boundaries", "gradient", "loss"}, by_itself=True)


@pytest.mark.parametrize("fault", NAMED)
def test_a_fault_in_a_job_is_caught_and_named(fault: str, world: World) -> None:
    assert_named(world, job_of, FAULTS[fault].layout, fault, NAMED[fault])


@pytest.mark.parametrize("fault", BY_ITSELF)
def test_a_fault_in_a_step_that_is_held_against_itself_is_named(fault: str, world: World) -> None:
    assert_named(world, job_of, FAULTS[fault].layout, fault, BY_ITSELF[fault], by_itself=True)


@pytest.mark.parametrize("fault", IN_SHARDS)
def test_a_fault_in_a_job_with_zero_1_is_caught_and_named(fault: str, world: World) -> None:
    assert_named(world, job_of, Layout(dp=2, zero=1), fault, IN_SHARDS[fault])


def test_what_the_job_raises_is_its_own_and_other_data_is_no_wrong_step(world: World) -> None:
    assert_its_own(world, job_of, Layout())
    assert_other_data_is_said(world, job_of, Layout())
