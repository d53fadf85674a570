"""What ran in the wrong mode or not once: the cause has the places of all that is wrong, and of nothing else."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import StageByStage
from pipeproof.core.cause import Cell, Cells
from pipeproof.core.observe.observed import Observed, Passed, RankOperation
from pipeproof.core.verdict import Mismatch, Verdict
from pipeproof.explain.attribution import Attribution
from pipeproof.explain.evidence import Evidence
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


def facts(
    mismatches: list[Mismatch],
    *ran: Action,
    stages: int = STAGES,
    count: int = COUNT,
    passed: Mapping[int, Passed] = MappingProxyType({}),
) -> Evidence:
    """Two ranks with every other stage, and what they ran."""
    rows = [(RankOperation("train", (), tuple(one for one in ran if one.stage % 2 == rank)),) for rank in range(2)]
    placement = tuple(stage % 2 for stage in range(stages))
    observed = Observed(Schedule("", count, placement, ((), ())), tuple(rows))
    verdict = Verdict("a step", "fail", "none", (), tuple(mismatches))
    return Evidence(verdict, placement, count, 2, gradients={}, norms=(), run=observed, passed=passed)


def evaluated(*stages: int) -> list[Mismatch]:
    return [Mismatch("microbatches", 1, False, True, "mode", rank=s % 2, stage=s) for s in stages]


def uncounted(what: Literal["forward", "backward"], *stages: int) -> list[Mismatch]:
    return [Mismatch("microbatches", 1, (0,), (0, 1, 2), what, rank=s % 2, stage=s) for s in stages]


def everything(stages: int = STAGES, count: int = COUNT) -> list[Action]:
    return [Action(s, kind, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for s in range(stages) for m in range(count)]


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


def but_for(wrong: list[Mismatch], left_out: Callable[[Action], bool], *again: Action) -> Evidence:
    return facts(wrong, *(one for one in everything() if not left_out(one)), *again)


def cut_off(*lost: int, own: float = 0.0) -> Evidence:
    """Stage 1 gave its input nothing in microbatch 1; stage 0 has that one so often in its sums, and lost backwards."""
    cells = Cells(((Cell(1.0), Cell(own)), (Cell(1.0), Cell(1.0))))
    ran = [one for one in everything(2, 2) if one not in [Action(0, Kind.BACKWARD, m) for m in lost]]
    passed = {1: Passed((), (), (), cut=frozenset({1}))}
    known = facts(
        [Mismatch("microbatches", 1, stage=stage) for stage in range(2)], *ran, stages=2, count=2, passed=passed
    )
    vars(known)["attribution"] = Attribution((), (), (), (), (), cells)
    return known


# What is known, and the kind, rank, stage and microbatches of each cause, and whether a graph was cut.
# Gradients flow from the last stage down, and activations up.
COUNTS: dict[str, tuple[Evidence, list[tuple[Any, ...]]]] = {
    "backwards left out": (
        but_for(
            uncounted("backward", *range(3)),
            lambda one: (one.kind, one.microbatch, one.stage < 3) == (Kind.BACKWARD, 1, True),
        ),
        [("dropped", 0, 2, (1,), False)],
    ),
    "forwards left out": (
        but_for(uncounted("forward", 1, 2, 3), lambda one: one.stage >= 1 and one.microbatch == 2),
        [("dropped", 1, 1, (2,), False)],
    ),
    "backwards again": (
        but_for(uncounted("backward", 2), lambda one: False, *(Action(2, Kind.BACKWARD, m) for m in (0, 1, 1))),
        [("doubled", 0, 2, (0, 1), False)],
    ),
    "nowhere": (
        but_for(uncounted("backward", *range(STAGES)), lambda one: one.kind is not Kind.FORWARD),
        [("dropped", None, None, (0, 1, 2), False)],
    ),
    "nothing to begin with": (cut_off(1), [("dropped", 1, 1, (1,), True)]),
    "and another": (cut_off(0, 1), [("dropped", 1, 1, (1,), True), ("dropped", 0, 0, (0,), False)]),
    "it came another way": (cut_off(0, own=1.0), [("dropped", 0, 0, (0,), False)]),
}


@pytest.mark.parametrize("title", COUNTS)
def test_what_did_not_run_once_is_named_where_it_began(title: str) -> None:
    known, expected = COUNTS[title]
    causes = counts(known)
    assert [(cause.kind, cause.rank, cause.stage, cause.microbatches, cause.cut) for cause in causes] == expected
    golden("\n".join(cause.detail for cause in causes))


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
