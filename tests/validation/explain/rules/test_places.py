"""A checked job of two stages, each on two replicas: what is wrong on some ranks alone is told of these."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pipeproof import SingleDevice, World, check_step
from pipeproof.core.cause import Cause
from pipeproof.core.replicas import Replicas
from pipeproof.core.verdict import Verdict
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.members import Members
from pipeproof.explain.rules.places import place_cause
from pipeproof.whitebox.matching import Local
from pipeproof.whitebox.rank import ModulePart
from pipeproof.whitebox.stages_in_order import PlacedStage
from pipeproof.worlds.worker import RankContext
from tests.support.golden import golden
from tests.support.steps import blocks, loss_fn, pairs

COUNT = 4
SPLIT = 2  # of four blocks
Change = Callable[[int, nn.Module], object]


def build() -> nn.Module:
    return blocks()


def left(rank: int, stage: nn.Module, *, on: tuple[int, ...]) -> None:
    """Something is in ``.grad`` before the step."""
    for parameter in stage.parameters() if rank in on else ():
        parameter.grad = torch.ones_like(parameter)


def times(rank: int, stage: nn.Module, *, by: Mapping[int, float], only: str = "") -> None:
    """Gradients are multiplied after the reduction."""
    for name, parameter in stage.named_parameters():
        assert parameter.grad is not None
        parameter.grad *= by.get(rank, 1.0) if only in name else 1.0


def own(rank: int, stage: nn.Module) -> None:
    """Rank 3 has its own microbatches' mean, in which the others have half a part."""
    whole, data = build(), pairs(COUNT)[1::2]
    for inputs, target in data if rank == 3 else ():
        (loss_fn(whole(inputs), target) / len(data)).backward()
    for parameter, its in zip(stage.parameters(), list(whole.parameters())[-4:], strict=True):
        parameter.grad = its.grad if rank == 3 else parameter.grad


def nothing(rank: int, stage: nn.Module) -> None:
    """The step is right."""


def step(context: RankContext, before: Change, after: Change, alone: int | None) -> Verdict:
    """Ranks 0 and 1 have the first stage, and each runs the whole model: what it has of it is checked."""
    rank, model = context.rank, build()
    stage, replica = divmod(rank, 2)
    assert isinstance(model, nn.Sequential)
    part = nn.ModuleDict({str(k): model[k] for k in range(SPLIT * stage, SPLIT * stage + SPLIT)})
    data = pairs(COUNT)[replica::2]
    group = [dist.new_group([2 * one, 2 * one + 1]) for one in range(2)][stage]
    before(rank, part)
    with check_step({stage: part}, data, against=SingleDevice(build, loss_fn), timeout_s=20.0) as check:
        losses = [loss_fn(model(inputs), target) for inputs, target in data]
        (torch.stack(losses).sum() / len(data)).backward()
        square = torch.zeros(())
        for parameter in part.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= 2
            square += parameter.grad.square().sum()
        mine = square.clone()
        dist.all_reduce(square)
        after(rank, part)
        check.gradients()
        reported = mine if rank == alone else square / 2
        check.report(losses=[one.item() for one in losses] if stage else None, norm=reported.sqrt().item())
    return check.verdict


def told(world: World, *, before: Change = nothing, after: Change = nothing, alone: int | None = None) -> Verdict:
    verdict, *others = world.run(step, before, after, alone, ranks=4)
    assert all(one.outcome == verdict.outcome and one.causes == verdict.causes for one in others)
    return verdict


def short(causes: tuple[Cause, ...]) -> list[tuple[str, str]]:
    return [(cause.kind, cause.place) for cause in causes]


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks
def test_a_right_job_passes(world: World) -> None:
    verdict = told(world)
    assert verdict.outcome == "pass", str(verdict)
    assert verdict.law("replicas").checked == 8


@pytest.mark.pipeproof_ranks
def test_a_norm_of_a_rank_alone_is_placed_on_the_rank_and_at_no_other_stage(world: World) -> None:
    (cause,) = told(world, alone=1).causes
    assert (cause.kind, cause.place) == ("norm", "rank 1"), str(cause)
    golden(cause.detail, numbers=False)


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (partial(times, by={0: 2.0}), [("scale", "rank 0, stage 0")]),
        (partial(times, by={3: -1.0}), [("sign", "rank 3, stage 1")]),
        (partial(times, by={1: 3.0, 3: 3.0}), [("scale", "rank 1, stage 0"), ("scale", "rank 3, stage 1")]),
        (partial(times, by={3: 0.0}, only="3.0.weight"), [("zero", "rank 3, stage 1, parameter 3.0.weight")]),
    ],
    ids=["twice", "sign", "both stages", "zero"],
)
def test_a_copy_that_is_some_times_what_is_due_is_told_of_its_rank(
    after: Change, expected: list[tuple[str, str]], world: World
) -> None:
    verdict = told(world, after=after)
    assert verdict.outcome == "fail"
    assert short(verdict.causes) == expected, str(verdict)


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks
def test_a_copy_with_the_microbatches_of_its_rank_alone_was_not_reduced(world: World) -> None:
    verdict = told(world, after=own)
    assert verdict.outcome == "fail"
    assert [(one.kind, one.rank, one.stage) for one in verdict.causes] == [("not-reduced", 3, 1)], str(verdict)


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize(
    ("on", "place", "factor"),
    [((2,), "rank 2, stage 1", 0.5), ((2, 3), "stage 1", 1.0), ((1, 3), "ranks 1, 3", 0.5)],
    ids=["one", "all of a stage", "one replica"],
)
def test_what_was_there_before_is_told_of_the_ranks_that_had_it(
    on: tuple[int, ...], place: str, factor: float, world: World
) -> None:
    (cause,) = told(world, before=partial(left, on=on)).causes
    assert (cause.kind, cause.place, cause.factor) == ("stale-gradient", place, factor), str(cause)


@pytest.mark.parametrize(
    ("shares", "microbatches", "rank"),
    [(((0, 1), (2, 3)), (2,), 1), (((0, 1), (2, 3)), (1, 2), None), (((), ()), (2,), None)],
    ids=["its own rank", "of both", "nobody says"],
)
def test_in_a_job_the_rank_is_told_that_ran_it(
    shares: tuple[tuple[int, ...], ...], microbatches: tuple[int, ...], rank: int | None
) -> None:
    part = ModulePart((Local("weight"),), (None,))
    stage = PlacedStage(0, 0, replace(part, members=((0, part), (1, part))), {0: "weight"}, {})
    members = Members([stage], Replicas((0, 1), 4, shares=shares), tuple, (None, None))
    verdict = Verdict("a step", "fail", "none", ())
    evidence = Evidence(verdict, (0,), 4, 2, gradients={}, norms=(None, None), members=members)
    assert place_cause(Cause("dropped", rank=0, stage=0, microbatches=microbatches), evidence).rank == rank
