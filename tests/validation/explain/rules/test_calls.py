"""What ran in the wrong mode or not once: the cause has the places of all that is wrong, and of nothing else."""

from functools import partial
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import StageByStage
from pipeproof.core.cause import Cell, Cells
from pipeproof.core.observe.observed import Observed, Passed, RankOperation
from pipeproof.core.verdict import Mismatch
from pipeproof.explain.rules.calls import counts, modes
from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.schedule import Schedule
from pipeproof.records.step_check import check_step
from pipeproof.whitebox import WhiteBox
from tests.support.golden import golden
from tests.support.pipeline_here import DATA, MSE, Job, layers
from tests.support.two_ranks import COUNT as OF_TWO_RANKS
from tests.support.two_ranks import judged, named, plain, step

STAGES, COUNT = 4, 3


def facts(mismatches: list[Mismatch], *ran: Action) -> Any:
    """Two ranks of two stages each, and what they ran."""
    rows = [(RankOperation("train", (), tuple(one for one in ran if one.stage % 2 == rank)),) for rank in range(2)]
    observed = Observed(Schedule("", COUNT, (0, 1, 0, 1), ((), ())), tuple(rows))
    return SimpleNamespace(
        verdict=SimpleNamespace(mismatches=mismatches),
        observed=observed,
        placement=(0, 1, 0, 1),
        number=0,
        operation="train",
        stages=STAGES,
        microbatches=COUNT,
        unseen=(),
        traced=(),
        passed={},
        holders=lambda stage: [stage % 2],
    )


def evaluated(*stages: int) -> list[Mismatch]:
    return [Mismatch("microbatches", 1, False, True, "mode", rank=s % 2, stage=s) for s in stages]


def uncounted(what: Literal["forward", "backward"], *stages: int) -> list[Mismatch]:
    return [Mismatch("microbatches", 1, (0,), (0, 1, 2), what, rank=s % 2, stage=s) for s in stages]


def everything() -> list[Action]:
    return [Action(s, kind, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for s in range(STAGES) for m in range(COUNT)]


@pytest.mark.parametrize(
    ("wrong", "rank", "stage", "stages", "place"),
    [
        ((1, 3), 1, None, (1, 3), "rank 1, stages 1, 3"),
        ((2,), 0, 2, (), "rank 0, stage 2"),
        ((0, 1, 2, 3), None, None, (), "everywhere"),
    ],
)
def test_a_mode_is_that_of_the_stages_with_it(
    wrong: tuple[int, ...], rank: int | None, stage: int | None, stages: tuple[int, ...], place: str
) -> None:
    (cause,) = modes(facts(evaluated(*wrong)))
    assert (cause.rank, cause.stage, cause.stages, cause.place) == (rank, stage, stages, place)


@pytest.mark.parametrize(
    ("wrong", "left_out", "again", "expected"),
    [
        # Gradients flow from the last stage down, and activations up.
        (
            uncounted("backward", *range(3)),
            lambda one: one.kind is Kind.BACKWARD and one.stage < 3 and one.microbatch == 1,
            (),
            ("dropped", 0, 2, (1,)),
        ),
        (
            uncounted("forward", 1, 2, 3),
            lambda one: one.stage >= 1 and one.microbatch == 2,
            (),
            ("dropped", 1, 1, (2,)),
        ),
        (uncounted("backward", 2), lambda one: False, (0, 1, 1), ("doubled", 0, 2, (0, 1))),
        (
            uncounted("backward", *range(STAGES)),
            lambda one: one.kind is not Kind.FORWARD,
            (),
            ("dropped", None, None, (0, 1, 2)),
        ),
    ],
    ids=["backwards left out", "forwards left out", "backwards again", "nowhere"],
)
def test_what_did_not_run_once_is_named_where_it_began(
    wrong: list[Mismatch], left_out: Any, again: tuple[int, ...], expected: tuple[Any, ...]
) -> None:
    ran = [one for one in everything() if not left_out(one)]
    (cause,) = counts(facts(wrong, *ran, *(Action(2, Kind.BACKWARD, m) for m in again)))
    assert (cause.kind, cause.rank, cause.stage, cause.microbatches) == expected
    golden(cause.detail)


EVERY = tuple(range(OF_TWO_RANKS))


def cut(model: nn.Sequential, microbatches: list[Any], *, those: tuple[int, ...], rank: int = 1) -> Any:
    """A rank's second block is given what is detached of its first."""
    block, ran = model[2 * rank + 1], iter(range(OF_TWO_RANKS))

    def forward(x: Tensor) -> Tensor:
        return nn.Sequential.forward(block, x.detach() if next(ran) in those else x)  # type: ignore[arg-type]

    if dist.get_rank() == rank:
        block.forward = forward
    return step(model, microbatches)


@pytest.mark.parametrize("those", [(2,), (1, 2), EVERY], ids=["one", "two", "all"])
def test_a_graph_that_is_cut_is_named_as_that_and_where_it_is(whitebox: WhiteBox, those: tuple[int, ...]) -> None:
    verdict = judged(whitebox, partial(cut, those=those), plain)
    assert named(verdict) == [("dropped", 1, 1, those)], verdict
    (cause,) = verdict.causes
    golden(cause.detail)
    assert verdict.law("microbatches").outcome == "pass"
    assert (verdict.mismatches[0].rank, verdict.mismatches[0].stage) == (1, 1)
    assert [one.what for one in cause.lines][:1] == [f"1F{those[0]}"]
    assert "detach" in verdict.next[0]
    golden(verdict.details, lines="but for")
    golden("\n".join(verdict.next))
    assert not verdict.undecided


@pytest.mark.sweep
def test_what_final_gradients_say_of_a_graph_that_is_cut_at_the_first_stage_is_said(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, partial(cut, those=(2,), rank=0), plain)
    assert named(verdict) == [("dropped", 0, 0, (2,))], verdict
    assert not verdict.causes[0].cut


def cut_facts(*ran: Action, own: float = 0.0) -> Any:
    """Stage 1 gave its input nothing in microbatch 1; stage 0 has that microbatch so often in its sums."""
    row = RankOperation("train", (), ran)
    stages = [SimpleNamespace(odd=())] * 2
    cells = Cells(((Cell(1.0), Cell(own)), (Cell(1.0), Cell(1.0))))
    return SimpleNamespace(
        verdict=SimpleNamespace(mismatches=[Mismatch("microbatches", 1, stage=stage) for stage in range(2)]),
        traced=(),
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
    (cause,) = counts(cut_facts(*all_but(Action(0, Kind.BACKWARD, 1))))
    assert (cause.kind, cause.stage, cause.microbatches, cause.cut) == ("dropped", 1, (1,), True)
    first, second = counts(cut_facts(*all_but(Action(0, Kind.BACKWARD, 0), Action(0, Kind.BACKWARD, 1))))
    assert (first.stage, first.cut, second.stage, second.microbatches, second.cut) == (1, True, 0, (0,), False)


def test_a_gradient_that_came_another_way_was_not_cut() -> None:
    (other,) = counts(cut_facts(*all_but(Action(0, Kind.BACKWARD, 0)), own=1.0))
    assert (other.stage, other.microbatches, other.cut) == (0, (0,), False)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_trial_is_no_call_for_another_microbatch(stages: int) -> None:
    """The last microbatch is left out, and the first comes twice: once in a trial that no backward runs through."""
    chain = layers(torch.tanh, torch.sin)[:stages]
    with check_step(dict(enumerate(chain)), DATA, against=StageByStage(MSE), rename="{}.{}".format) as check:
        tried = DATA[0][0]
        for stage in chain:
            tried = stage(tried)
        Job(chain, DATA[:-1]).step()
        check.gradients()
    cause, *_ = check.verdict.causes
    assert (cause.kind, cause.microbatches) == ("dropped", (len(DATA) - 1,)), str(check.verdict)
