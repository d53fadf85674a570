"""A checked job of two stages with a copy of one weight in each: what is wrong is told of all that may have done it."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import SimulatedWorld, SingleDevice, World, check_step, record_step
from pipeproof.core.cause import Cause
from pipeproof.core.verdict import Verdict
from pipeproof.worlds.worker import RankContext
from tests.support.golden import golden
from tests.support.steps import WIDTH, loss_fn, pairs

COUNT = 4


class Tied(nn.Module):
    """Two layers, and the first one's weight once more at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.second(torch.tanh(nn.functional.linear(x, self.first.weight)))
        return nn.functional.linear(torch.tanh(hidden), self.last)

    @property
    def last(self) -> Tensor:
        return self.first.weight


class Apart(Tied):
    """The same with a weight of its own at the end, so that each stage's share is known."""

    def __init__(self) -> None:
        super().__init__()
        self.copy = nn.Parameter(self.first.weight.detach().clone())

    @property
    def last(self) -> Tensor:
        return self.copy


def build(kind: type[Tied] = Tied) -> Tied:
    torch.manual_seed(0)
    return kind()


def step(
    context: RankContext, replicas: int, reduced: tuple[str, ...], left: tuple[int, ...], alone: bool, times: float
) -> Verdict:
    """Rank ``replicas * s + r`` has stage s of replica r, and runs all of the model to get its own share."""
    stage, replica = divmod(context.rank, replicas)
    data = pairs(COUNT)[replica::replicas]
    groups = {
        "stage": [dist.new_group([s * replicas + r for r in range(replicas)]) for s in range(2)][stage],
        "tied": [dist.new_group([r, replicas + r]) for r in range(replicas)][replica],
        "all": dist.group.WORLD,
    }
    part, whole = build(), build(Apart)
    held = nn.ModuleDict({"first": part.first, **({"second": part.second} if stage else {})})
    if context.rank in left:
        part.first.weight.grad = torch.full_like(part.first.weight, 0.1)
    against = record_step(build(), pairs(COUNT), loss_fn=loss_fn) if alone else SingleDevice(build, loss_fn)
    with check_step({stage: held}, data, against=against, timeout_s=20.0) as check:
        losses = [loss_fn(whole(inputs), target) for inputs, target in data]
        (torch.stack(losses).sum() / len(data)).backward()
        given = {"first.weight": (whole.copy if stage else whole.first.weight).grad}
        given |= {f"second.{name}": one.grad for name, one in whole.second.named_parameters()}
        for name, parameter in held.named_parameters():
            its = given[name]
            assert its is not None
            parameter.grad = its if parameter.grad is None else parameter.grad + its
            tied = name == "first.weight"
            for what in reduced if tied else ("stage",):
                dist.all_reduce(parameter.grad, group=groups[what])
                parameter.grad /= replicas if what == "stage" else 1
            parameter.grad *= times if tied and context.rank == 0 else 1
        check.gradients()
        check.report(losses=[one.item() for one in losses] if stage else None)
    return check.verdict


def told(
    world: World,
    replicas: int,
    *,
    reduced: tuple[str, ...] = ("stage", "tied"),
    left: tuple[int, ...] = (),
    alone: bool = False,
    times: float = 1.0,
) -> Verdict:
    return world.run(step, replicas, reduced, left, alone, times, ranks=2 * replicas)[0]


def short(causes: tuple[Cause, ...]) -> list[tuple[str, str]]:
    return [(cause.kind, cause.place) for cause in causes]


WEIGHT = "parameter first.weight"


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("reduced", [("stage", "tied"), ("tied", "stage")])
def test_a_right_job_has_nothing_wrong(reduced: tuple[str, ...], world: World) -> None:
    verdict = told(world, 2, reduced=reduced)
    assert verdict.outcome == "pass", str(verdict)


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize(
    ("reduced", "expected", "words"),
    [
        (
            ("tied",),
            [("not-reduced", f"stages 0, 1, {WEIGHT}")],
            "ranks 0, 2 lack microbatches 2, 3; ranks 1, 3 lack",
        ),
        (
            ("stage",),
            [("tied-not-summed", WEIGHT)],
            "ranks 0, 1 and ranks 2, 3 each keep their own part: the sum of",
        ),
        (
            (),
            [("tied-not-summed", WEIGHT), ("not-reduced", f"stages 0, 1, {WEIGHT}")],
            "ranks 0, 1, 2, 3 each keep their own part: 1/2 of the sum of these is expected",
        ),
    ],
    ids=["not over replicas", "not over stages", "neither"],
)
def test_the_axis_along_which_copies_are_apart_tells_which_sum_is_missing(
    reduced: tuple[str, ...], expected: list[tuple[str, str]], words: str, world: World
) -> None:
    verdict = told(world, 2, reduced=reduced)
    assert short(verdict.causes) == expected, str(verdict)
    assert words in verdict.causes[0].detail


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("alone", [False, True], ids=["beside", "record"])
@pytest.mark.parametrize(
    ("left", "place", "factor"),
    [
        ((0,), "rank 0, stage 0", 1.0),
        ((1,), f"rank 1, stage 1, {WEIGHT}", 1.0),
        ((0, 1), f"stages 0, 1, {WEIGHT}", 2.0),
    ],
)
def test_what_was_there_before_is_told_of_the_stages_that_had_it(
    left: tuple[int, ...], place: str, factor: float, alone: bool, world: World
) -> None:
    (cause,) = told(world, 1, left=left, alone=alone).causes
    assert (cause.kind, cause.place, cause.factor) == ("stale-gradient", place, factor), str(cause)
    golden(cause.detail, numbers=False)


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize(
    ("left", "place", "factor"),
    [
        ((2,), f"rank 2, stage 1, {WEIGHT}", 0.5),
        ((1, 2), f"ranks 1, 2, stages 0, 1, {WEIGHT}", 0.5),
        ((2, 3), f"stage 1, {WEIGHT}", 0.5),
    ],
)
def test_of_replicas_it_is_told_of_the_ranks_that_had_it(
    left: tuple[int, ...], place: str, factor: float, world: World
) -> None:
    (cause,) = told(world, 2, left=left).causes
    assert (cause.kind, cause.place, cause.factor) == ("stale-gradient", place, factor), str(cause)


@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("alone", [False, True], ids=["beside", "record"])
@pytest.mark.parametrize(
    ("replicas", "reduced"), [(1, ("tied", "tied")), (2, ("stage", "all"))], ids=["twice", "over all ranks"]
)
def test_a_factor_of_every_copy_is_no_one_stages(
    replicas: int, reduced: tuple[str, ...], alone: bool, world: World
) -> None:
    (cause,) = told(world, replicas, reduced=reduced, alone=alone).causes
    assert (cause.kind, cause.place, cause.factor) == ("scale", f"stages 0, 1, {WEIGHT}", 2.0), str(cause)


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks
def test_a_factor_of_one_copy_alone_is_of_its_stage(world: World) -> None:
    (cause,) = told(world, 1, times=3.0).causes
    assert (cause.kind, cause.rank, cause.stage, cause.factor) == ("scale", 0, 0, 3.0), str(cause)


def in_bf16() -> nn.Module:
    return build(Apart).bfloat16()


def replicated(context: RankContext, reduced: bool, noisy: bool) -> Verdict:
    """Two replicas of a model in bf16, with two microbatches each."""
    data = [(x.bfloat16(), target.bfloat16()) for x, target in pairs(COUNT)[context.rank :: 2]]
    model = in_bf16()
    with check_step({0: model}, data, against=SingleDevice(in_bf16, loss_fn)) as check:
        for x, target in data:
            (loss_fn(model(x), target) / len(data)).backward()
        for one in (p.grad for p in model.parameters() if p.grad is not None):
            if reduced:
                dist.all_reduce(one)
                one /= 2
            if noisy and context.rank:
                one *= 1 + 2**-7
        check.gradients()
    return check.verdict


@pytest.mark.parametrize(
    ("reduced", "noisy", "kinds"), [(False, False, {"not-reduced"}), (True, False, set()), (True, True, set())]
)
def test_gradients_in_bf16_that_no_rank_reduced_are_told_from_others(
    reduced: bool, noisy: bool, kinds: set[str]
) -> None:
    with SimulatedWorld(silent=True) as world:
        verdict = world.run(replicated, reduced, noisy, ranks=2)[0]
    assert {one.kind for one in verdict.causes} == kinds, str(verdict)
    assert verdict.law("replicas").outcome == ("pass" if reduced and not noisy else "fail")
