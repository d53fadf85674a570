"""A step of a running job of Megatron-core's under pipeproof: right ones pass, faults are named, and the job goes on.

``ci/frameworks`` runs this in an environment that has Megatron-core; elsewhere it is skipped.
"""

from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: ci/frameworks installs it")

from pipeproof import World
from tests.frameworks import gpt_job
from tests.frameworks.engines.megatron_layout import MegatronLayout as Layout
from tests.frameworks.fault import named
from tests.frameworks.gpt_job import job_of
from tests.frameworks.jobs import (
    Cause,
    assert_any_order_passes,
    assert_named,
    assert_other_data_is_said,
    assert_right,
    checked,
    checked_and_unchecked,
    ranks_of,
)
from tests.frameworks.megatron_faults import BF16, FAULTS

pytestmark = pytest.mark.pipeproof_ranks

RIGHT = {
    "1f1b": Layout(optimizer=True),
    "interleaved-tied": Layout(vp=2, tied=True, p2p_overlap=True, optimizer=True),
    "replicas-tied": Layout(dp=2, tied=True, optimizer=True),
    "bf16-tied": Layout(bf16=True, tied=True, optimizer=True),
    "bf16-replicas": Layout(bf16=True, dp=2, optimizer=True),
    "bf16-shards": Layout(bf16=True, dp=2, distributed=True, optimizer=True),
    "shards": Layout(dp=2, distributed=True, optimizer=True),
    "scaled-loss": Layout(dp=2, distributed=True, optimizer=True, scaled=True),
    "shards-tied-interleaved": Layout(dp=2, vp=2, tied=True, p2p_overlap=True, distributed=True, optimizer=True),
    "replicas-per-token": Layout(dp=2, three=True, per_token=True, optimizer=True),
}
LACKING = [
    ("not-reduced", "stage 0, parameter model.decoder.layers.0.mlp.linear_fc2.weight"),
    ("not-reduced", "stage 1, parameter model.decoder.layers.3.self_attention.linear_proj.weight"),
]
ROUNDED = "rank 1, stage 1, parameter model.decoder.final_layernorm.bias"  # and others, in words
SHARDS = Layout(dp=2, distributed=True, optimizer=True)
BF16_REPLICAS = Layout(bf16=True, dp=2, optimizer=True)
TIED = "parameter model.embedding.word_embeddings.weight"
# What the step's numbers alone tell, in no messages between stages; a list has all causes.
NAMED: list[tuple[str, Layout | None, Cause | list[Cause]]] = [
    ("not-divided", None, ("scale", "everywhere")),
    ("tied-not-reduced", None, ("tied-not-summed", TIED)),
    ("not-finalized", None, ("not-reduced", "stage 0")),
    ("norm-counts-copies", None, ("norm", "everywhere")),
    ("norm-of-one-stage", None, ("norm", "everywhere")),
    ("summed-over-replicas", None, ("scale", "everywhere")),
    ("last-in-first-out", None, ("swapped-gradients", "rank 0, stage 0, microbatches 0, 1, 2, 3")),
    ("other-shard", SHARDS, LACKING),
    ("not-finalized", SHARDS, LACKING),
    ("summed-over-replicas", SHARDS, [("scale", "everywhere")]),
    ("not-divided", SHARDS, [("scale", "everywhere")]),
    ("last-in-first-out", SHARDS, [("swapped-gradients", "stage 0, microbatches 0, 1, 2, 3, 4, 5, 6, 7")]),
    ("norm-of-one-stage", SHARDS, [("norm", "everywhere")]),
    ("not-divided", BF16, [("scale", "everywhere")]),
    ("not-finalized", BF16_REPLICAS, [("not-reduced", "stage 0"), ("not-reduced", "stage 1")]),
    ("added-in-bf16", BF16, [("rounded", ROUNDED)]),
    ("cast-to-bf16", BF16, [("rounded", ROUNDED)]),
    ("added-again", BF16, [("scale", "rank 1, stage 1")]),
    ("last-in-first-out", BF16, [("swapped-gradients", "rank 0, stage 0, microbatches 0, 1, 2, 3")]),
]
BY_ITSELF = {
    "not-divided": ("scale", "everywhere"),
    "tied-not-reduced": ("tied-not-summed", TIED),
    "not-finalized": ("not-reduced", "rank 0, stage 0"),
    "norm-counts-copies": ("norm", "everywhere"),
    "norm-of-one-stage": ("norm", "rank 0"),
    "summed-over-replicas": ("scale", "everywhere"),
    "last-in-first-out": ("mispaired", "rank 0, stage 0, microbatches 0, 1, 2, 3, action 0B1"),
    "other-stream": ("mispaired", "rank 1, stage 1, microbatches 0, 1, 2, 3, action 1F1"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_passes_and_the_job_is_as_without_a_check(name: str, world: World) -> None:
    assert_right(world, job_of, RIGHT[name], "fp32", {"gradient", "loss", "parameters-once", "grad-norm"})


@pytest.mark.parametrize("name", [name for name in RIGHT if name != "replicas-per-token"])
def test_a_right_step_that_is_held_against_itself_passes(name: str, world: World) -> None:
    laws = {"boundaries", "gradient", "loss", "grad-norm"}
    assert_right(world, job_of, RIGHT[name], None, laws, by_itself=True)


@pytest.mark.parametrize(("fault", "layout", "causes"), NAMED)
def test_a_fault_in_a_job_is_caught_and_named(fault: str, layout: Layout | None, causes: Any, world: World) -> None:
    assert_named(world, job_of, layout or FAULTS[fault].layout, fault, causes)


@pytest.mark.parametrize("fault", BY_ITSELF)
def test_a_fault_in_a_step_that_is_held_against_itself_is_named(fault: str, world: World) -> None:
    assert_named(world, job_of, FAULTS[fault].layout, fault, BY_ITSELF[fault], by_itself=True)


def test_what_megatrons_tracker_draws_is_drawn_again_and_the_job_draws_on(world: World) -> None:
    for verdict, harmed in world.run(gpt_job.drew_by_the_tracker, Layout(optimizer=True), ranks=2):
        assert (verdict.outcome, harmed) == ("pass", []), str(verdict)


def test_a_step_whose_gradients_are_divided_by_tokens_is_not_held_against_itself(world: World) -> None:
    layout = RIGHT["replicas-per-token"]
    for verdict, harmed in world.run(checked_and_unchecked, job_of, layout, True, ranks=ranks_of(layout)):
        assert (verdict.outcome, harmed) == ("unknown", [])
        assert "calculate_per_token_loss is True, and no rank knows the tokens of all" in verdict.details


def test_gradients_of_the_step_before_are_known_where_megatron_adds_to_them(world: World) -> None:
    for verdict in world.run(gpt_job.not_cleared, Layout(optimizer=True), ranks=2):
        assert named(verdict) == ("fail", [("stale-gradient", "everywhere")]), str(verdict)


def test_another_stream_is_caught_and_no_wrong_cause_is_named(world: World) -> None:
    for verdict in world.run(checked, job_of, FAULTS["other-stream"].layout, "other-stream", ranks=2):
        assert verdict.outcome == "fail", str(verdict)
        assert verdict.law("loss").outcome == "fail"
        assert verdict.causes == ()


def test_a_shard_that_is_lost_after_gradients_were_compared_is_no_wrong_norm(world: World) -> None:
    for verdict in world.run(checked, job_of, SHARDS, "shard-zeroed", ranks=4):
        failed = {law.name for law in verdict.laws if law.outcome == "fail"}
        assert (verdict.outcome, failed, verdict.causes) == ("fail", {"grad-norm"}, ()), str(verdict)
        assert "every gradient that was compared is what it should be" in verdict.details
        assert "gradients were changed after they were compared and before it was formed" in verdict.details


def test_what_a_job_draws_is_held_against_what_was_given_in_any_order(world: World) -> None:
    assert_other_data_is_said(world, job_of, Layout(optimizer=True))
    assert_any_order_passes(world, job_of, Layout(optimizer=True))
