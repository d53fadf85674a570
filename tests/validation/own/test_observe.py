"""Observing must not disturb, and must see what it is there to see."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from pipeproof.core.observe.observed import Claim, RankOperation
from pipeproof.core.observe.wrappers import AroundStage
from pipeproof.own.case import Case
from pipeproof.own.data import data_for
from pipeproof.own.judgement import judge
from pipeproof.own.observe import WatchedStage, as_one, observe, observe_rank
from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.stage import Goal
from pipeproof.reference.model import build_model
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World


class Fixed(AroundStage):
    """A stage that hands on what it is told to."""

    def __init__(self, value: float) -> None:
        self.value = value

    @property
    def index(self) -> int:
        return 3

    @property
    def module(self) -> nn.Module:
        return nn.Identity()

    def begin(self) -> None:
        pass

    def forward(self, microbatch: int, inputs: tuple[torch.Tensor, ...], goal: Goal | None) -> tuple[torch.Tensor, ...]:
        return torch.tensor([1.0, self.value]), torch.tensor([7])


def test_a_watched_stage_notes_what_is_not_finite() -> None:
    for value, noted in ((1.0, []), (math.nan, ["3F2"]), (math.inf, ["3F2"])):
        stage = WatchedStage(Fixed(value))
        stage.begin()
        stage.forward(2, (), None)
        assert list(map(str, stage.nonfinite)) == noted


def test_operations_have_different_data_and_ranks_the_same() -> None:
    case = Case("1f1b", 1, 1, 2, (1,), model="mlp")
    one, again, other = (data_for(case, number)[0].inputs[0] for number in (0, 0, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.sweep
def test_every_rank_reports_every_operation(world: World) -> None:
    case = Case("1f1b", 2, 1, 3, (1, 1), model="mlp")
    observed = observe(case, world)
    assert [[op.operation for op in rank] for rank in observed.ranks] == [list(case.plan)] * 2
    names = {name for name, _ in build_model("mlp", layers=2, seed=0).named_parameters()}
    for number, operation in enumerate(case.plan):
        gradients = {name for _, name in observed.gradients(number)}
        assert gradients == (names if operation == "train" else set())
        known = [len(rank[number].losses) for rank in observed.ranks]
        assert known == ([0, 3] if operation == "accumulate" else [3, 3])
    assert observed.ranks[0][0].norm == observed.ranks[1][0].norm


@pytest.mark.sweep
def test_two_runs_of_a_case_give_the_same_bits(world: World) -> None:
    case = Case("gpipe", 2, 1, 3, (1, 1), model="gpt", plan=("train",))
    one, two = (observe(case, world).gradients(0) for _ in range(2))
    assert all(torch.equal(one[site], two[site]) for site in one)  # type: ignore[arg-type]


def planted(context: RankContext, case: Case, place: str) -> list[Any]:
    """A rank's part, where an observer raises."""
    with mock.patch(f"pipeproof.{place}", side_effect=RuntimeError("planted")):
        return [*observe_rank(context, case, record=True)]


@pytest.mark.parametrize(
    ("place", "law", "recorded"),
    [
        ("own.observe.WatchedStage._note", "not observed", True),
        ("core.observe.recorder.RecordedStage._mark_passage", "pass", False),
        ("core.observe.recorder.RecordedStage._on_flow", "pass", False),
    ],
)
def test_an_observer_that_raises_leaves_the_step_as_it_is(world: World, place: str, law: str, recorded: bool) -> None:
    case = Case("1f1b", 2, 1, 2, (1, 1), model="mlp", plan=("train",))
    observed = as_one(case, [tuple(row) for row in world.run(planted, case, place, ranks=2)])
    verdict = judge(case, observed)
    assert (verdict.outcome, verdict.law("microbatches").outcome) == ("pass", law), str(verdict)
    assert (observed.recording(0) is not None) == recorded
    assert ("planted" in verdict.law("microbatches").note) == (law == "not observed")


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


ONE = observed(torch.ones(2))


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        (ONE, ONE, None),
        (observed(None), observed(None), None),
        (ONE, observed(torch.ones(2) * (1 + 1e-7)), "another gradient than rank 0's, relative error 1.2e-07"),
        (ONE, observed(None), "another gradient than rank 0's, which has one"),
        (ONE, observed(torch.ones(2), parameter=2.0), "another parameter than rank 0's, relative error 1"),
    ],
    ids=["equal", "none in both", "gradient", "none", "parameter"],
)
def test_what_differs_between_replicas_is_said(one: RankOperation, other: RankOperation, words: str | None) -> None:
    expected = [] if words is None else [(1, SITE, words)]
    assert [(claim.rank, claim.site, claim.observed) for claim in broken(one, other)] == expected


def test_a_single_replica_is_left_as_it_is() -> None:
    alone = Case.parse("gpipe r1 s1 m2 split=1 model=mlp plan=train runtime=torch")
    assert as_one(alone, [(ONE,)]).ranks == ((ONE,),)
