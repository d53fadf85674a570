"""Torchtitan's own pipelines under pipeproof, in validations and in running jobs: faults are named.

``ci/frameworks`` runs this in an environment that has torchtitan; elsewhere it is skipped.
"""

import pytest

pytest.importorskip("torchtitan", reason="torchtitan is not installed: ci/frameworks installs it")

from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

from pipeproof import World
from pipeproof.whitebox import WhiteBox
from tests.frameworks import shared, titan_job
from tests.frameworks.engines.tiny_titan import judged
from tests.frameworks.engines.torchtitan_layout import TorchtitanLayout as Layout
from tests.frameworks.fault import named, passed
from tests.frameworks.jobs import (
    assert_any_order_passes,
    assert_its_own,
    assert_other_data_is_said,
    checked,
    compared,
    drew,
    ranks_of,
)
from tests.frameworks.titan_job import job_of
from tests.frameworks.torchtitan_faults import ATTENTION, EVERY, FAULTS, step

pytestmark = pytest.mark.pipeproof_ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "bitwise": {
        "1f1b": Layout(),
        "interleaved": Layout(schedule="Interleaved1F1B", vp=2),
        "zb-v": Layout(schedule="ZBVZeroBubble", vp=2),
        "zb-v in bf16": (Layout(schedule="ZBVZeroBubble", vp=2, bf16=True), 8),
        "zb-h1 in bf16 and shards": (Layout(schedule="InterleavedZeroBubble", vp=2, dp=2, bf16=True), 16),
    },
    # Not to the bit: norms are of other partial sums; replicas add in another order.
    "fp32": {
        "clipped": Layout(clipped=True),
        "fsdp": (Layout(dp=2), 8),
        "replicated": (Layout(dp=2, replicate=2), 8),
    },
}
LAWS = {"grad-norm": attrgetter("clipped"), "initial-weights": lambda _: True, "shards": lambda _: True}
RIGHT = {
    "1f1b": (Layout(), "bitwise"),
    "1f1b-clipped": (Layout(clipped=True), "fp32"),
    "interleaved": (Layout(schedule="Interleaved1F1B", vp=2, clipped=True), "fp32"),
    "zb-v": (Layout(schedule="ZBVZeroBubble", vp=2), "bitwise"),
    "zb-v in bf16": (Layout(schedule="ZBVZeroBubble", vp=2, bf16=True), "bitwise"),
    "fsdp": (Layout(dp=2, clipped=True), "fp32"),
    "replicated": (Layout(dp=2, replicate=2, clipped=True), "fp32"),
}
IN_SHARDS = Layout(dp=2, clipped=True)
NAMED = [  # what the step's numbers alone tell: no messages between stages are observed
    (
        Layout(),
        {
            "not-divided": [("scale", "everywhere")],
            "ignored-counted": [("scale", "everywhere")],
            "other-labels": [("swapped-data", EVERY)],
            "last-dropped": [("dropped", "microbatch 3")],
            "scaled-by-schedule": [("scale", "everywhere")],
            "layer-twice": [("partition", f"rank 0, stage 0, parameter model.layers.1.{ATTENTION}")],
        },
    ),
    (Layout(clipped=True), {"norm-of-one-stage": [("norm", "everywhere")]}),
    (
        IN_SHARDS,
        {
            "own-tokens": [("scale", "microbatches 0, 1, 2, 3, 4, 5, 6, 7")],
            "mean-over-replicas": [("scale", "everywhere")],
            "shards-off-by-one": [("misplaced", f"rank {rank}, stage {rank // 2}") for rank in range(4)],
            "shards-not-reduced": [("not-reduced", "stage 0"), ("not-reduced", "stage 1")],
        },
    ),
]
BY_ITSELF = [
    (
        Layout(),
        {
            "not-divided": ("scale", "everywhere"),
            "ignored-counted": ("scale", "everywhere"),
            "other-labels": ("swapped-data", "rank 1, stage 1, microbatches 0, 1, 2, 3"),
            "last-dropped": [],
            "scaled-by-schedule": ("scale", "everywhere"),
        },
    ),
    (Layout(clipped=True), {"norm-of-one-stage": ("norm", "rank 0")}),
    (
        IN_SHARDS,
        {
            "own-tokens": ("scale", "rank 2, stage 1, action 1B0"),
            "mean-over-replicas": ("scale", "everywhere"),
            "shards-not-reduced": [],
        },
    ),
]
ITSELF = dict.fromkeys(RIGHT)
ITSELF_LAWS = {"boundaries", "gradient", "loss", "updated-parameters"}
test_a_right_layout_passes, test_a_fault_is_named = shared.OF_ENGINES
test_a_right_step_passes, test_a_fault_in_a_job_is_named = shared.OF_JOBS
test_a_step_passes_against_itself, test_a_fault_is_named_against_itself = shared.AGAINST_ITSELF


def test_positions_that_come_to_the_first_stage_alone_are_caught_without_a_name(whitebox: WhiteBox) -> None:
    verdict = judged(Layout(), own_step=partial(step, "positions-lost"), whitebox=whitebox)
    assert verdict.outcome == "fail", str(verdict)
    assert "rank 1, stage 1, parameter model.layers.2" in verdict.details


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
