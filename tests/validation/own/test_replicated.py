"""Replicas as one: their microbatches keep apart, and what they must have alike is compared bit for bit."""

import pytest
import torch
from torch import Tensor

from pipeproof.core.observe.observed import Claim, RankOperation
from pipeproof.own.case import Case
from pipeproof.own.replicated import as_one
from pipeproof.pipeline.action import Action, Kind

CASE = Case.parse("gpipe r1 s1 m2 split=1 model=mlp plan=train options=unscaled replicas=2 runtime=torch")
SITE = (0, "weight")


def observed(gradient: Tensor | None, parameter: float = 1.0) -> RankOperation:
    ran = tuple(Action(0, kind, microbatch) for kind in (Kind.FORWARD, Kind.BACKWARD) for microbatch in range(2))
    called = ((ran[0], True), (ran[1], True))
    parameters = {SITE: torch.full((2,), parameter)}
    return RankOperation("train", (0.5, 0.25), ran, called=called, gradients={SITE: gradient}, parameters=parameters)


def broken(*rows: RankOperation) -> list[Claim]:
    claims = [claim for rank in as_one(CASE, [(row,) for row in rows]).ranks for claim in rank[0].claims]
    assert {claim.law for claim in claims} == {"replicas"}
    return [claim for claim in claims if not claim.holds]


def test_microbatches_are_numbered_over_all_replicas() -> None:
    one = as_one(CASE, [(observed(torch.ones(2)),), (observed(torch.ones(2)),)])
    assert one.forwards(0) == {0: [0, 2, 1, 3]}
    assert one.backwards(0) == {0: [0, 2, 1, 3]}
    assert [rank[0].share for rank in one.ranks] == [(0, 2), (1, 3)]
    assert sorted(action.microbatch for action, _ in one.calls(0)) == [0, 1, 2, 3]
    assert one.gradient_sites(0) == [SITE]  # once, for all replicas


def test_equal_replicas_hold() -> None:
    assert broken(observed(torch.ones(2)), observed(torch.ones(2))) == []
    assert broken(observed(None), observed(None)) == []


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (observed(torch.ones(2) * (1 + 1e-7)), "another gradient than rank 0's, relative error 1.2e-07"),
        (observed(None), "another gradient than rank 0's, which has one"),
        (observed(torch.ones(2), parameter=2.0), "another parameter than rank 0's, relative error 1"),
    ],
    ids=["gradient", "none", "parameter"],
)
def test_what_differs_is_said(other: RankOperation, words: str) -> None:
    (claim,) = broken(observed(torch.ones(2)), other)
    assert (claim.rank, claim.site, claim.observed) == (1, SITE, words)


def test_a_single_replica_is_left_as_it_is() -> None:
    alone = Case.parse("gpipe r1 s1 m2 split=1 model=mlp plan=train runtime=torch")
    row = (observed(torch.ones(2)),)
    assert as_one(alone, [row]).ranks == (row,)
