"""A step of a running job of Megatron-core's under pipeproof: right ones pass, faults are named, and the job goes on.

``ci/frameworks`` runs this in an environment that has Megatron-core; elsewhere it is skipped.
"""

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: ci/frameworks installs it")

from pipeproof import World
from tests.frameworks import gpt_job
from tests.frameworks.engines.megatron_layout import MegatronLayout as Layout
from tests.frameworks.fault import named, passed
from tests.frameworks.megatron_faults import BF16, FAULTS

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
NAMED = {  # what the step's numbers alone tell: no messages between stages are seen
    "not-divided": ("scale", "everywhere"),
    "tied-not-reduced": ("tied-not-summed", "parameter model.embedding.word_embeddings.weight"),
    "not-finalized": ("not-reduced", "stage 0"),
    "norm-counts-copies": ("norm", "everywhere"),
    "norm-of-one-stage": ("norm", "everywhere"),
    "summed-over-replicas": ("scale", "everywhere"),
    "last-in-first-out": ("swapped-gradients", "rank 0, stage 0, microbatches 0, 1, 2, 3"),
}


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_step_passes_and_the_job_is_as_without_a_check(name: str, world: World) -> None:
    layout, tier = RIGHT[name]
    for verdict, harmed in world.run(gpt_job.checked_and_unchecked, layout, ranks=layout.pp * layout.dp):
        assert (verdict.verdict, verdict.tier) == ("pass", tier), str(verdict)
        assert passed(verdict) >= {"gradient", "loss", "parameters-once", "grad-norm"}
        assert harmed == []


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("name", NAMED)
def test_a_fault_in_a_job_is_caught_and_named(name: str, world: World) -> None:
    layout, (kind, place) = FAULTS[name].layout, NAMED[name]
    for verdict in world.run(gpt_job.checked, layout, name, ranks=layout.pp * layout.dp):
        outcome, causes = named(verdict)
        assert (outcome, causes[:1]) == ("fail", [(kind, place)]), str(verdict)


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("name", [name for name in RIGHT if name != "replicas-per-token"])
def test_a_right_step_that_is_held_against_itself_passes(name: str, world: World) -> None:
    layout, _ = RIGHT[name]
    for verdict, harmed in world.run(gpt_job.checked_and_unchecked, layout, True, ranks=layout.pp * layout.dp):
        assert verdict.verdict == "pass", str(verdict)
        assert passed(verdict) >= {"boundaries", "gradient", "loss", "grad-norm"}
        assert harmed == []


@pytest.mark.pipeproof_ranks
def test_what_megatrons_tracker_draws_is_drawn_again_and_the_job_draws_on(world: World) -> None:
    for verdict, harmed in world.run(gpt_job.drew_by_the_tracker, Layout(optimizer=True), ranks=2):
        assert (verdict.verdict, harmed) == ("pass", []), str(verdict)


@pytest.mark.pipeproof_ranks
def test_a_step_whose_gradients_are_divided_by_tokens_is_not_held_against_itself(world: World) -> None:
    layout, _ = RIGHT["replicas-per-token"]
    for verdict, harmed in world.run(gpt_job.checked_and_unchecked, layout, True, ranks=layout.pp * layout.dp):
        assert (verdict.verdict, harmed) == ("unknown", [])
        assert "calculate_per_token_loss is True, and nobody knows the tokens of all" in verdict.details


BY_ITSELF = {
    "not-divided": ("scale", "everywhere"),
    "tied-not-reduced": ("tied-not-summed", "parameter model.embedding.word_embeddings.weight"),
    "not-finalized": ("not-reduced", "rank 0, stage 0"),
    "norm-counts-copies": ("norm", "everywhere"),
    "norm-of-one-stage": ("norm", "rank 0"),
    "summed-over-replicas": ("scale", "everywhere"),
    "last-in-first-out": ("mispaired", "rank 0, stage 0, microbatches 0, 1, 2, 3, action 0B1"),
    "other-stream": ("mispaired", "rank 1, stage 1, microbatches 0, 1, 2, 3, action 1F1"),
}


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("name", BY_ITSELF)
def test_a_fault_in_a_step_that_is_held_against_itself_is_named(name: str, world: World) -> None:
    layout = FAULTS[name].layout
    for verdict in world.run(gpt_job.checked, layout, name, True, ranks=layout.pp * layout.dp):
        outcome, causes = named(verdict)
        assert (outcome, causes[:1]) == ("fail", [BY_ITSELF[name]]), str(verdict)


@pytest.mark.pipeproof_ranks
def test_gradients_of_the_step_before_are_known_where_megatron_adds_to_them(world: World) -> None:
    for verdict in world.run(gpt_job.not_cleared, Layout(optimizer=True), ranks=2):
        assert named(verdict) == ("fail", [("stale-gradient", "everywhere")]), str(verdict)


@pytest.mark.pipeproof_ranks
def test_another_stream_is_caught_and_no_wrong_cause_is_named(world: World) -> None:
    for verdict in world.run(gpt_job.checked, FAULTS["other-stream"].layout, "other-stream", ranks=2):
        assert verdict.verdict == "fail", str(verdict)
        assert verdict.law("loss").outcome == "fail"
        assert verdict.cause == ()


LACKING = [
    ("not-reduced", "stage 0, parameter model.decoder.layers.0.mlp.linear_fc2.weight"),
    ("not-reduced", "stage 1, parameter model.decoder.layers.3.self_attention.linear_proj.weight"),
]
IN_SHARDS = {
    "other-shard": LACKING,
    "not-finalized": LACKING,
    "summed-over-replicas": [("scale", "everywhere")],
    "not-divided": [("scale", "everywhere")],
    "last-in-first-out": [("swapped-gradients", "stage 0, microbatches 0, 1, 2, 3, 4, 5, 6, 7")],
    "norm-of-one-stage": [("norm", "everywhere")],
}


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("name", IN_SHARDS)
def test_a_fault_in_a_job_with_a_distributed_optimizer_is_caught_and_named(name: str, world: World) -> None:
    layout = Layout(dp=2, distributed=True, optimizer=True)
    for verdict in world.run(gpt_job.checked, layout, name, ranks=4):
        assert named(verdict) == ("fail", IN_SHARDS[name]), str(verdict)


@pytest.mark.pipeproof_ranks
def test_a_shard_that_is_lost_after_gradients_were_compared_is_no_wrong_norm(world: World) -> None:
    layout = Layout(dp=2, distributed=True, optimizer=True)
    for verdict in world.run(gpt_job.checked, layout, "shard-zeroed", ranks=4):
        failed = {law.name for law in verdict.laws if law.outcome == "fail"}
        assert (verdict.verdict, failed, verdict.cause) == ("fail", {"grad-norm"}, ()), str(verdict)
        assert "every gradient that was compared is what it should be" in verdict.details
        assert "gradients were changed after they were compared and before it was formed" in verdict.details


ROUNDED = "rank 1, stage 1, parameter model.decoder.final_layernorm.bias"  # and others, in words
IN_BF16 = {
    "not-divided": (BF16, [("scale", "everywhere")]),
    "not-finalized": (
        Layout(bf16=True, dp=2, optimizer=True),
        [("not-reduced", "stage 0"), ("not-reduced", "stage 1")],
    ),
    "added-in-bf16": (BF16, [("rounded", ROUNDED)]),
    "cast-to-bf16": (BF16, [("rounded", ROUNDED)]),
    "added-again": (BF16, [("scale", "rank 1, stage 1")]),
    "last-in-first-out": (
        BF16,
        [("swapped-gradients", "rank 0, stage 0, microbatches 0, 1, 2, 3")],
    ),
}


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("name", IN_BF16)
def test_a_fault_in_a_job_in_bf16_is_caught_and_named(name: str, world: World) -> None:
    layout, causes = IN_BF16[name]
    for verdict in world.run(gpt_job.checked, layout, name, ranks=layout.pp * layout.dp):
        assert named(verdict) == ("fail", causes), str(verdict)


@pytest.mark.pipeproof_ranks
def test_a_step_of_other_data_than_was_given_is_no_wrong_step(world: World) -> None:
    for verdict in world.run(gpt_job.drew_others, Layout(optimizer=True), ranks=2):
        assert verdict.verdict == "unknown", str(verdict)
        assert "the job drew data that is in none of the microbatches given to the check" in verdict.details


@pytest.mark.pipeproof_ranks
def test_the_order_in_which_a_job_draws_what_was_given_is_its_own(world: World) -> None:
    for verdict in world.run(gpt_job.drew_in_another_order, Layout(optimizer=True), ranks=2):
        assert verdict.verdict == "pass", str(verdict)
        assert "loss" in passed(verdict)
