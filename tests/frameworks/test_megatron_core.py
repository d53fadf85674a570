"""Megatron-core itself under pipeproof, in validations and in running jobs: right passes, faults are named.

``ci/frameworks`` runs this in an environment that has Megatron-core; elsewhere it is skipped.
"""

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: ci/frameworks installs it")

from operator import attrgetter
from typing import Any

import torch

from pipeproof import World
from pipeproof.whitebox import WhiteBox
from tests.frameworks import gpt_job, shared
from tests.frameworks.engines.megatron_layout import MegatronLayout as Layout
from tests.frameworks.engines.tiny_gpt import judged
from tests.frameworks.fault import named
from tests.frameworks.gpt_job import job_of
from tests.frameworks.jobs import (
    assert_any_order_passes,
    assert_other_data_is_said,
    checked,
    checked_and_unchecked,
    ranks_of,
)
from tests.frameworks.megatron_faults import BF16, FAULTS
from tests.frameworks.megatron_faults import step as step

pytestmark = pytest.mark.pipeproof_ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "bitwise": {
        "1f1b": Layout(),
        "one-stage": Layout(pp=1),
        "four-ranks": (Layout(pp=4), 8),
        "few-microbatches": (Layout(pp=4), 2),
        "interleaved": Layout(pp=4, vp=2, layers=8),
        "interleaved-overlap": Layout(vp=2, p2p_overlap=True),
        "interleaved-four-ranks-overlap": (Layout(pp=4, vp=2, layers=8, p2p_overlap=True), 8),
        "loss-of-three": Layout(three=True),
        "bf16": Layout(bf16=True),
        "bf16-replicas": Layout(bf16=True, dp=2),
        "tied": Layout(tied=True),
        "tied-interleaved": Layout(vp=2, tied=True, p2p_overlap=True),
    },
    # Not to the bit: replicas are added, gradients divided by tokens, or norms summed in another order.
    "fp32": {
        "tied-four-ranks-optimizer": Layout(pp=4, tied=True, optimizer=True),
        "per-token": Layout(three=True, per_token=True),
        "replicas": Layout(dp=2),
        "replicas-per-token": Layout(dp=2, three=True, per_token=True),
        "replicas-overlap-tied-optimizer": Layout(dp=2, overlap=True, tied=True, optimizer=True),
        "replicas-interleaved": Layout(dp=2, vp=2, overlap=True, p2p_overlap=True),
        "distributed-optimizer": Layout(dp=2, distributed=True, tied=True, optimizer=True, overlap=True),
        "scaled-loss": Layout(bf16=True, optimizer=True, scaled=True),
        "scaled-loss-shards": Layout(dp=2, distributed=True, tied=True, optimizer=True, scaled=True),
    },
}
LAWS = {"grad-norm": attrgetter("optimizer")}
RIGHT = {
    "1f1b": (Layout(optimizer=True), "fp32"),
    "interleaved-tied": (Layout(vp=2, tied=True, p2p_overlap=True, optimizer=True), "fp32"),
    "replicas-tied": (Layout(dp=2, tied=True, optimizer=True), "fp32"),
    "bf16-tied": (Layout(bf16=True, tied=True, optimizer=True), "fp32"),
    "bf16-replicas": (Layout(bf16=True, dp=2, optimizer=True), "fp32"),
    "bf16-shards": (Layout(bf16=True, dp=2, distributed=True, optimizer=True), "fp32"),
    "shards": (Layout(dp=2, distributed=True, optimizer=True), "fp32"),
    "scaled-loss": (Layout(dp=2, distributed=True, optimizer=True, scaled=True), "fp32"),
    "shards-tied-interleaved": (
        Layout(dp=2, vp=2, tied=True, p2p_overlap=True, distributed=True, optimizer=True),
        "fp32",
    ),
    "replicas-per-token": (Layout(dp=2, three=True, per_token=True, optimizer=True), "fp32"),
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
NAMED: list[tuple[Layout | None, dict[str, Any]]] = [
    (
        None,
        {
            "not-divided": ("scale", "everywhere"),
            "tied-not-reduced": ("tied-not-summed", TIED),
            "not-finalized": ("not-reduced", "stage 0"),
            "norm-counts-copies": ("norm", "everywhere"),
            "norm-of-one-stage": ("norm", "everywhere"),
            "summed-over-replicas": ("scale", "everywhere"),
            "last-in-first-out": ("swapped-gradients", "rank 0, stage 0, microbatches 0, 1, 2, 3"),
        },
    ),
    (
        SHARDS,
        {
            "other-shard": LACKING,
            "not-finalized": LACKING,
            "summed-over-replicas": [("scale", "everywhere")],
            "not-divided": [("scale", "everywhere")],
            "last-in-first-out": [("swapped-gradients", "stage 0, microbatches 0, 1, 2, 3, 4, 5, 6, 7")],
            "norm-of-one-stage": [("norm", "everywhere")],
        },
    ),
    (
        BF16,
        {
            "not-divided": [("scale", "everywhere")],
            "added-in-bf16": [("rounded", ROUNDED)],
            "cast-to-bf16": [("rounded", ROUNDED)],
            "added-again": [("scale", "rank 1, stage 1")],
            "last-in-first-out": [("swapped-gradients", "rank 0, stage 0, microbatches 0, 1, 2, 3")],
        },
    ),
    (BF16_REPLICAS, {"not-finalized": [("not-reduced", "stage 0"), ("not-reduced", "stage 1")]}),
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
ITSELF = dict.fromkeys(name for name in RIGHT if name != "replicas-per-token")
ITSELF_LAWS = {"boundaries", "gradient", "loss", "grad-norm"}
test_a_right_layout_passes, test_a_fault_is_named = shared.OF_ENGINES
test_a_right_step_passes, test_a_fault_in_a_job_is_named = shared.OF_JOBS
test_a_step_passes_against_itself, test_a_fault_is_named_against_itself = shared.AGAINST_ITSELF


@pytest.mark.parametrize(
    ("layout", "outcome"),
    [
        (Layout(optimizer=True), "pass"),
        (Layout(dp=2, distributed=True, tied=True, optimizer=True), "pass"),
        (Layout(optimizer=True, bf16=True), "not observed"),  # of copies in fp32
        (Layout(optimizer=True, second=True), "not observed"),  # the optimizer goes on from the step before
    ],
)
def test_an_update_is_compared_with_one_of_gradients_that_were_clipped_alike(
    layout: Layout, outcome: str, whitebox: WhiteBox
) -> None:
    verdict = judged(layout, optimizer=adam_w, whitebox=whitebox)
    assert verdict.outcome == "pass", str(verdict)
    law = verdict.law("updated-parameters")
    assert law.outcome == outcome, str(verdict)
    assert ("updates are not compared" in law.note) == (outcome != "pass")


def adam_w(model: Any) -> torch.optim.Optimizer:
    """As Megatron makes one: biases do not decay."""
    named = dict(model.named_parameters())
    own = [one for name, one in named.items() if not name.endswith(".bias")]
    biases = [one for name, one in named.items() if name.endswith(".bias")]
    return torch.optim.AdamW([{"params": own}, {"params": biases, "weight_decay": 0.0}], lr=0.1, weight_decay=0.01)


def test_what_megatrons_tracker_draws_is_drawn_again_and_the_job_draws_on(world: World) -> None:
    for verdict, harmed in world.run(gpt_job.drew_by_the_tracker, Layout(optimizer=True), ranks=2):
        assert (verdict.outcome, harmed) == ("pass", []), str(verdict)


def test_a_step_whose_gradients_are_divided_by_tokens_is_not_held_against_itself(world: World) -> None:
    layout, _ = RIGHT["replicas-per-token"]
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
