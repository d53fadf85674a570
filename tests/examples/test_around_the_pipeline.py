"""Each kind of parallelism around the pipeline is validated as it is added, and one bug in each is caught."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from around_the_pipeline import RANKS, REPLICAS, WIDTH, build_model, recomputing, replicated, sharded, sharded_by_hand
from torch import nn

from pipeproof.core.verdict import Mismatch, Verdict
from pipeproof.whitebox import WhiteBox
from tests.support.golden import golden
from tests.support.steps import pairs
from tests.support.sweeps import some


def judged(whitebox: WhiteBox, step: Callable[..., Any]) -> Verdict:
    data, loss_fn = pairs(8, rows=3, width=WIDTH), nn.functional.mse_loss
    return whitebox.validate(step, reference=build_model, microbatches=data, loss_fn=loss_fn, ranks=REPLICAS)


def failing(verdict: Verdict) -> set[str]:
    return {law.name for law in verdict.laws if law.outcome in ("fail", "unknown")}


def first(verdict: Verdict, law: str) -> Mismatch:
    return next(mismatch for mismatch in verdict.mismatches if mismatch.law == law)


RIGHT: dict[str, tuple[Callable[..., Any], dict[str, int]]] = {  # a step, and how much of what is compared
    "ddp": (replicated, {"replicas": 8 * 2, "loss": RANKS * 4, "grad-norm": RANKS}),
    # Initial weights as they were gathered for the forward.
    "fully_shard": (sharded, {"shards": 8, "initial-weights": 16, "grad-norm": RANKS}),
    "shards with their index": (sharded_by_hand, {"shards": 8}),
    "recompute": (recomputing, {"gradient": 8}),
    "recompute, reentrant": (partial(recomputing, reentrant=True), {"gradient": 8}),
}


@pytest.mark.parametrize("kind", ["1F1B", "ZB-H1"])
@pytest.mark.parametrize("name", some(RIGHT, left=["shards with their index"]))
def test_what_is_around_the_pipeline_passes(whitebox: WhiteBox, name: str, kind: str) -> None:
    step, counts = RIGHT[name]
    verdict = judged(whitebox, partial(step, kind=kind))
    verdict.raise_if_failed()
    assert verdict.outcome == "pass"
    assert {law: verdict.law(law).checked for law in counts} == counts
    if name == "ddp":
        assert verdict.law("shards").outcome == "not applicable"
        assert verdict.law("boundaries").checked >= 8 * 2 * 4 - 8, "gradients at boundaries too, a replica's scale too"


def test_a_replica_that_is_not_reduced(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, partial(replicated, fault="not reduced"))
    assert failing(verdict) == {"replicas", "gradient", "grad-norm"}
    found = first(verdict, "replicas")
    assert (found.rank, found.stage, found.parameter) == (3, 1, "2.inner.0.weight")
    assert verdict.law("replicas").wrong == 4, "of stage 1 alone"
    golden(f"{found.observed_text}\n{found.expected_text}\n{verdict.causes[0].detail}", numbers=False)


@pytest.mark.sweep
def test_a_mean_where_a_sum_was_meant(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, partial(replicated, fault="mean for sum"))
    assert failing(verdict) == {"gradient"}
    assert first(verdict, "gradient").observed.factor == pytest.approx(0.5)
    golden(verdict.causes[0].detail)


def test_a_norm_that_misses_the_other_shards(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, partial(sharded, fault="norm of own shards"))
    assert failing(verdict) == {"grad-norm"}
    assert [mismatch.rank for mismatch in verdict.mismatches] == [*range(RANKS)]
    for replica in (0, 1):
        one, two = (verdict.mismatches[rank].observed for rank in (replica, replica + 2))
        assert one == two < verdict.mismatches[replica].expected
    golden(verdict.causes[0].detail)


@pytest.mark.sweep
def test_shards_in_the_wrong_order(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, partial(sharded_by_hand, fault="wrong order"))
    assert failing(verdict) == {"gradient"}
    assert (first(verdict, "gradient").rank, first(verdict, "gradient").stage) == (0, 0), "at the cause"
    golden(verdict.causes[0].detail)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_with_another_dropout(whitebox: WhiteBox, reentrant: bool) -> None:
    verdict = judged(whitebox, partial(recomputing, reentrant=reentrant, fault="other dropout"))
    assert failing(verdict) == {"boundaries", "gradient"}, "every forward was right, and so is the loss"
    assert verdict.law("boundaries").outcome == "unknown", "gradients that are like none of the reference's"
    assert "were not compared" in verdict.law("boundaries").note
    assert verdict.law("boundaries").checked > 0
    found = first(verdict, "gradient")
    assert (found.rank, found.stage, found.parameter) == (2, 1, "2.inner.0.bias")
    assert "cosine 0." in found.observed_text
    assert verdict.law("replicas").outcome == "pass", "it was reduced all the same"
