"""Each kind of parallelism around the pipeline is validated as it is added, and one bug in each is caught."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from around_the_pipeline import (
    RANKS,
    REPLICAS,
    WIDTH,
    build_model,
    recomputing,
    replicated,
    sharded,
    sharded_by_hand,
)
from torch import nn

from pipeproof.core.verdict import Mismatch, Size, Verdict
from pipeproof.whitebox import WhiteBox
from tests.support.golden import golden

KINDS = ["1F1B", "ZB-H1"]


def judged(whitebox: WhiteBox, step: Callable[..., Any]) -> Verdict:
    draw = torch.Generator().manual_seed(0)
    microbatches = [(torch.randn(3, WIDTH, generator=draw), torch.randn(3, WIDTH, generator=draw)) for _ in range(8)]
    return whitebox.validate(
        step,
        reference=build_model,
        microbatches=microbatches,
        loss_fn=nn.functional.mse_loss,
        ranks=REPLICAS,
    )


def failing(verdict: Verdict) -> set[str]:
    return {law.name for law in verdict.laws if law.outcome in ("fail", "unknown")}


def first(verdict: Verdict, law: str) -> Mismatch:
    return next(mismatch for mismatch in verdict.mismatches if mismatch.law == law)


@pytest.mark.parametrize("kind", KINDS)
def test_replicas_in_ddp(whitebox: WhiteBox, kind: str) -> None:
    verdict = judged(whitebox, partial(replicated, kind=kind))
    verdict.raise_if_failed()
    assert verdict.outcome == "pass"
    assert verdict.law("replicas").checked == 8 * 2
    assert verdict.law("loss").checked == RANKS * 4
    assert verdict.law("grad-norm").checked == RANKS
    assert verdict.law("shards").outcome == "not applicable"
    assert verdict.law("boundaries").checked >= 8 * 2 * 4 - 8, "gradients at boundaries too, a replica's scale and all"


@pytest.mark.parametrize("kind", KINDS)
def test_shards_of_fully_shard(whitebox: WhiteBox, kind: str) -> None:
    verdict = judged(whitebox, partial(sharded, kind=kind))
    verdict.raise_if_failed()
    assert verdict.outcome == "pass"
    assert verdict.law("shards").checked == 8
    assert verdict.law("initial-weights").checked == 16, "as they were gathered for the forward"
    assert verdict.law("grad-norm").checked == RANKS


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
def test_shards_with_their_index(whitebox: WhiteBox, kind: str) -> None:
    verdict = judged(whitebox, partial(sharded_by_hand, kind=kind))
    verdict.raise_if_failed()
    assert (verdict.outcome, verdict.law("shards").checked) == ("pass", 8)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute(whitebox: WhiteBox, kind: str, reentrant: bool) -> None:
    verdict = judged(whitebox, partial(recomputing, kind=kind, reentrant=reentrant))
    verdict.raise_if_failed()
    assert (verdict.outcome, verdict.law("gradient").checked) == ("pass", 8)


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
    found = first(verdict, "gradient").observed
    assert isinstance(found, Size)
    assert found.factor == pytest.approx(0.5)
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
