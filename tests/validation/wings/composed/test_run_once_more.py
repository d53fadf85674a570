"""Kernels that add up in any order never give the same twice: that is no fault, and hides none that is larger."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof import Composed, check_step
from pipeproof.core.verdict import Verdict
from pipeproof.reference.step import Contribution
from pipeproof.wings.composed.own_links import OwnStage
from pipeproof.wings.composed.run_once_more import RunOnceMore
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World

LOSS = nn.functional.mse_loss
WIDTH, ROWS, COUNT = 8, 5, 4
RUNS = "RUNS"  # in the environment, how many kernels ran: as a race it is the machine's, and no check puts it back


class Unsteady(torch.autograd.Function):
    """Passes on, and in its backward differs by so much each time, as where atomics race."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: float) -> Tensor:
        ctx.size = size
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        number = int(os.environ[RUNS])
        os.environ[RUNS] = f"{number + 1}"
        draw = torch.Generator().manual_seed(number)
        return gradients[0] * (1 + ctx.size * torch.randn(gradients[0].shape, generator=draw)), None


class Stage(nn.Module):
    """Two layers with an unsteady kernel between them."""

    def __init__(self, size: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.size = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), size

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(Unsteady.apply(torch.tanh(self.first(x)), self.size))
        return out


def job(context: RankContext, size: float, factor: float, lost: int | None, cast: bool = False) -> tuple[Verdict, bool]:
    """A step; the verdict, and whether rounding was measured in fp64."""
    os.environ[RUNS] = "0"
    stage, measured = Stage(size), []
    floors = OwnStage.floors.func  # type: ignore[attr-defined]  # a cached property has it

    def noted(own: OwnStage) -> Any:
        measured.append(own)
        return floors(own)

    data = [(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)) for _ in range(COUNT)]
    kept = OwnStage.__dict__["floors"]
    OwnStage.floors = property(noted)  # type: ignore[assignment, misc]
    try:
        with check_step({0: stage}, data, against=Composed(LOSS)) as check:
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                losses = [LOSS(stage(x), target) for x, target in data]
            for number, loss in enumerate(losses):
                before = [None if one.grad is None else one.grad.clone() for one in stage.parameters()]
                (loss / COUNT).backward()
                if number == lost:
                    for one, was in zip(stage.parameters(), before, strict=True):
                        one.grad = was
            stage.first.weight.grad *= factor  # type: ignore[operator]  # it is there
            check.gradients()
            check.report(losses=losses)
    finally:
        OwnStage.floors = kept
    return check.verdict, bool(measured)


@pytest.mark.parametrize(
    ("size", "cast", "tier"), [(0.0, False, "bitwise"), (1e-7, False, "fp32"), (5e-3, True, "bf16")]
)
def test_a_right_step_passes_and_another_run_is_measure_enough(
    size: float, cast: bool, tier: str, world: World
) -> None:
    ((verdict, measured),) = world.run(job, size, 1.0, None, cast, ranks=1)
    assert (verdict.verdict, verdict.tier, measured) == ("pass", tier, False), str(verdict)
    assert (verdict.law("gradient").worst > 0) == (size > 0)


def test_kernels_that_differ_by_more_than_their_type_rounds_are_not_judged(world: World) -> None:
    ((verdict, _),) = world.run(job, 2e-4, 1.0, None, ranks=1)
    assert verdict.verdict == "unknown", str(verdict)


@pytest.mark.parametrize(("size", "factor", "cast"), [(1e-7, 1.001, False), (1e-5, 0.99, False), (5e-3, 1.2, True)])
def test_what_differs_by_more_than_runs_do_fails(size: float, factor: float, cast: bool, world: World) -> None:
    ((verdict, _),) = world.run(job, size, factor, None, cast, ranks=1)
    assert verdict.verdict == "fail", str(verdict)
    assert {(one.law, one.parameter) for one in verdict.mismatches} == {("gradient", "first.weight")}


@pytest.mark.parametrize(("size", "cast"), [(1e-7, False), (5e-3, True)])
def test_a_microbatch_that_is_lost_is_found(size: float, cast: bool, world: World) -> None:
    ((verdict, _),) = world.run(job, size, 1.0, 2, cast, ranks=1)
    assert verdict.verdict == "fail", str(verdict)


def test_the_smallest_part_of_a_sum_says_how_coarse_it_is() -> None:
    site = (0, "w")

    def given(*values: float) -> Contribution:
        return Contribution(0.0, {site: torch.tensor(values)}, {}, {}, {})

    def add(one: Contribution, sums: Any) -> Any:
        part = one.gradients[site]
        return {site: part if site not in sums else sums[site] + part}

    found = RunOnceMore.of([given(3.0, 0.0), given(0.0, 4.0)], add)
    floor = found.floor(site, apart=0.25, size=5.0)
    assert floor is not None
    assert (floor.permutation, floor.fault) == (0.25, 3 / 5)
    assert found.floor((0, "v"), apart=0.0, size=1.0) is None
