"""A graph that is cut inside a stage: its backward ran, and the sentence says so."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof.core.cause import Cell, Cells
from pipeproof.core.verdict import Mismatch
from pipeproof.explain.rules.calls import counts
from pipeproof.foreign import WhiteBox
from pipeproof.observers.observed import Observed, Passed, RankOperation
from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.schedule import Schedule
from tests.support.golden import golden
from tests.support.two_ranks import COUNT, judged, named, plain, step

EVERY = tuple(range(COUNT))


def cut(model: nn.Sequential, microbatches: list[Any], *, those: tuple[int, ...], rank: int = 1) -> Any:
    """A rank's second block is given what is detached of its first."""
    block, ran = model[2 * rank + 1], iter(range(COUNT))

    def forward(x: Tensor) -> Tensor:
        return nn.Sequential.forward(block, x.detach() if next(ran) in those else x)  # type: ignore[arg-type]

    if dist.get_rank() == rank:
        block.forward = forward
    return step(model, microbatches)


@pytest.mark.parametrize("those", [(2,), (1, 2), EVERY], ids=["one", "two", "all"])
def test_a_graph_that_is_cut_is_named_as_that_and_where_it_is(whitebox: WhiteBox, those: tuple[int, ...]) -> None:
    verdict = judged(whitebox, partial(cut, those=those), plain)
    assert named(verdict) == [("dropped", 1, 1, those)], verdict
    (cause,) = verdict.cause
    golden(cause.detail)
    assert verdict.law("microbatches").outcome == "pass"
    assert (verdict.mismatches[0].rank, verdict.mismatches[0].stage) == (1, 1)
    assert [one.what for one in cause.lines][:1] == [f"1F{those[0]}"]
    assert "detach" in verdict.next[0]
    golden(verdict.details, lines="but for")
    golden("\n".join(verdict.next))
    assert not verdict.undecided


def test_what_final_gradients_say_of_a_graph_that_is_cut_at_the_first_stage_is_said(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, partial(cut, those=(2,), rank=0), plain)
    assert named(verdict) == [("dropped", 0, 0, (2,))], verdict
    assert not verdict.cause[0].cut


def facts(*ran: Action, own: float = 0.0) -> Any:
    """Stage 1 gave its input nothing in microbatch 1; stage 0 has that microbatch so often in its sums."""
    row = RankOperation("train", (), ran)
    stages = [SimpleNamespace(odd=())] * 2
    cells = Cells(((Cell(1.0), Cell(own)), (Cell(1.0), Cell(1.0))))
    return SimpleNamespace(
        verdict=SimpleNamespace(mismatches=[Mismatch("microbatches", 1, stage=stage) for stage in range(2)]),
        told=(),
        observed=Observed(Schedule("", 2, (0, 0), ((),)), ((row,),)),
        passed={1: Passed((), (), (), cut=frozenset({1}))},
        attribution=SimpleNamespace(cells=cells, stages=stages),
        placement=(0, 0),
        number=0,
        operation="train",
        stages=2,
        microbatches=2,
        unseen=(),
        frozen=range(0),
    )


def all_but(*left_out: Action) -> list[Action]:
    kinds = Kind.FORWARD, Kind.BACKWARD
    every = [Action(stage, kind, m) for kind in kinds for stage in range(2) for m in range(2)]
    return [action for action in every if action not in left_out]


def test_backwards_that_had_nothing_to_begin_with_come_of_the_cut() -> None:
    (cause,) = counts(facts(*all_but(Action(0, Kind.BACKWARD, 1))))
    assert (cause.kind, cause.stage, cause.microbatches, cause.cut) == ("dropped", 1, (1,), True)
    first, second = counts(facts(*all_but(Action(0, Kind.BACKWARD, 0), Action(0, Kind.BACKWARD, 1))))
    assert (first.stage, first.cut, second.stage, second.microbatches, second.cut) == (1, True, 0, (0,), False)


def test_a_gradient_that_came_another_way_was_not_cut() -> None:
    (other,) = counts(facts(*all_but(Action(0, Kind.BACKWARD, 0)), own=1.0))
    assert (other.stage, other.microbatches, other.cut) == (0, (0,), False)
