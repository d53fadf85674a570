"""A step of a running job of torchtitan's under pipeproof: right ones pass, faults are named, and the job goes on.

``ci/frameworks`` runs this in an environment that has torchtitan; elsewhere it is skipped.
"""

from pathlib import Path

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: ci/frameworks installs it")

from pipeproof import World
from tests.frameworks import titan_job
from tests.frameworks.engines.torchtitan_layout import TorchtitanLayout as Layout
from tests.frameworks.fault import named, passed
from tests.frameworks.jobs import (
    assert_any_order_passes,
    assert_its_own,
    assert_named,
    assert_other_data_is_said,
    assert_right,
    checked,
    compared,
    drew,
    ranks_of,
)
from tests.frameworks.titan_job import job_of
from tests.frameworks.torchtitan_faults import EVERY, FAULTS

pytestmark = pytest.mark.pipeproof_ranks

RIGHT = {
    "1f1b": (Layout(), "bitwise"),
    "1f1b-clipped": (Layout(clipped=True), "fp32"),
    "interleaved": (Layout(schedule="Interleaved1F1B", vp=2, clipped=True), "fp32"),
    "zb-v": (Layout(schedule="ZBVZeroBubble", vp=2), "bitwise"),
    "zb-v in bf16": (Layout(schedule="ZBVZeroBubble", vp=2, bf16=True), "bitwise"),
    "fsdp": (Layout(dp=2, clipped=True), "fp32"),
    "replicated": (Layout(dp=2, replicate=2, clipped=True), "fp32"),
}
ALL_EIGHT = "microbatches 0, 1, 2, 3, 4, 5, 6, 7"
IN_SHARDS = Layout(dp=2, clipped=True)
NAMED = {  # what the step's numbers alone tell: no messages between stages are observed
    "not-divided": (Layout(), [("scale", "everywhere")]),
    "own-tokens": (IN_SHARDS, [("scale", ALL_EIGHT)]),
    "ignored-counted": (Layout(), [("scale", "everywhere")]),
    "other-labels": (Layout(), [("swapped-data", EVERY)]),
    "last-dropped": (Layout(), [("dropped", "microbatch 3")]),
    "scaled-by-schedule": (Layout(), [("scale", "everywhere")]),
    "layer-twice": (
        Layout(),
        [("partition", "rank 0, stage 0, parameter model.layers.1.attention.qkv_linear.wqkv.weight")],
    ),
    "norm-of-one-stage": (Layout(clipped=True), [("norm", "everywhere")]),
    "mean-over-replicas": (IN_SHARDS, [("scale", "everywhere")]),
    "shards-off-by-one": (IN_SHARDS, [("misplaced", f"rank {rank}, stage {rank // 2}") for rank in range(4)]),
    "shards-not-reduced": (IN_SHARDS, [("not-reduced", "stage 0"), ("not-reduced", "stage 1")]),
}
BY_ITSELF: dict[str, tuple[Layout, tuple[str, str] | None]] = {  # the first of what is named, and where; None: nothing
    "not-divided": (Layout(), ("scale", "everywhere")),
    "own-tokens": (IN_SHARDS, ("scale", "rank 2, stage 1, action 1B0")),
    "ignored-counted": (Layout(), ("scale", "everywhere")),
    "other-labels": (Layout(), ("swapped-data", "rank 1, stage 1, microbatches 0, 1, 2, 3")),
    "last-dropped": (Layout(), None),
    "scaled-by-schedule": (Layout(), ("scale", "everywhere")),
    "norm-of-one-stage": (Layout(clipped=True), ("norm", "rank 0")),
    "mean-over-replicas": (IN_SHARDS, ("scale", "everywhere")),
    "shards-not-reduced": (IN_SHARDS, None),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_passes_and_the_job_is_as_without_a_check(name: str, world: World) -> None:
    layout, tier = RIGHT[name]
    norm = {"grad-norm"} if layout.clipped else set()
    assert_right(world, job_of, layout, tier, {"gradient", "loss", "parameters-once"} | norm)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_that_is_held_against_itself_passes(name: str, world: World) -> None:
    laws = {"boundaries", "gradient", "loss", "updated-parameters"}
    assert_right(world, job_of, RIGHT[name][0], None, laws, by_itself=True)


@pytest.mark.parametrize("fault", NAMED)
def test_a_fault_in_a_job_is_caught_and_named(fault: str, world: World) -> None:
    layout, causes = NAMED[fault]
    assert_named(world, job_of, layout, fault, causes)


@pytest.mark.parametrize("fault", BY_ITSELF)
def test_a_fault_in_a_step_that_is_held_against_itself_is_named(fault: str, world: World) -> None:
    layout, first = BY_ITSELF[fault]
    assert_named(world, job_of, layout, fault, first or [], by_itself=True)


@pytest.mark.parametrize("name", ["other-positions", "positions-lost", "labels-not-shifted", "other-weights"])
def test_what_sums_alone_do_not_tell_is_caught_and_no_cause_is_named(name: str, world: World) -> None:
    layout = FAULTS[name].layout if name in FAULTS else Layout()
    for verdict in world.run(checked, job_of, layout, name, ranks=ranks_of(layout)):
        assert (verdict.outcome, verdict.causes) == ("fail", ()), str(verdict)


RECORDED = {
    "1f1b": (Layout(), "bitwise"),
    "zb-v": (Layout(schedule="ZBVZeroBubble", vp=2, clipped=True), "fp32"),
    "fsdp": (IN_SHARDS, "fp32"),
}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_step_is_that_of_one_device(name: str, world: World, tmp_path: Path) -> None:
    layout, tier = RECORDED[name]
    same_bits = tier == "bitwise"  # or Adam's first update makes much of what rounding did to a small gradient
    verdict = compared(world, job_of, layout, tmp_path, titan_job.expected(layout, stepping=same_bits))
    assert (verdict.outcome, verdict.tier) == ("pass", tier), str(verdict)
    assert passed(verdict) >= {"gradient", "loss", "parameters-once"}
    assert (verdict.law("updated-parameters").outcome == "pass") == same_bits
    assert (verdict.law("grad-norm").outcome == "pass") == layout.clipped


@pytest.mark.parametrize(("fault", "layout"), [("not-divided", Layout()), ("mean-over-replicas", IN_SHARDS)])
def test_a_fault_in_a_recorded_step_is_named(fault: str, layout: Layout, world: World, tmp_path: Path) -> None:
    verdict = compared(world, job_of, layout, tmp_path, titan_job.expected(layout), fault)
    assert named(verdict) == ("fail", [("scale", "everywhere")]), str(verdict)


def test_what_the_job_raises_is_its_own(world: World) -> None:
    assert_its_own(world, job_of, IN_SHARDS)


def test_what_a_job_draws_is_held_against_what_was_given_in_any_order(world: World) -> None:
    assert_other_data_is_said(world, job_of, Layout())
    assert_any_order_passes(world, job_of, Layout())


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        (Layout(clipped=True), "the block took more than one step of the optimizer: put one step into it"),
        (Layout(), "rank 1: the block ran 8 microbatches, and the check was given 4: put one step into it"),
    ],
    ids=["clipped", "not-clipped"],
)
def test_two_steps_in_one_block_are_no_verdict_on_the_first(layout: Layout, sentence: str, world: World) -> None:
    for verdict in world.run(drew, job_of, layout, "twice", ranks=2):
        assert verdict.outcome == "unknown", str(verdict)
        assert sentence in verdict.details
