"""Kernels that add up in any order never give the same twice: that is no fault, and hides none that is larger."""

import os
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof import Composed, check_step
from pipeproof.core.verdict import Verdict
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World

LOSS = nn.functional.mse_loss
WIDTH, ROWS, COUNT = 8, 5, 4
RUNS, CALLS = "RUNS", "CALLS"  # how many, in the environment: a race is the machine's, and no check puts it back


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

    def __init__(self, size: float, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last, self.size = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), size

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(Unsteady.apply(torch.tanh(self.first(x)), self.size))
        return out


def padded(output: Tensor, target: Tensor) -> Tensor:
    """The loss, to which a target of ones adds nothing."""
    return (output * 0).sum() if bool((target == 1).all()) else LOSS(output, target)


def job(context: RankContext, size: float, factor: float, lost: int | None, cast: bool = False) -> tuple[Verdict, int]:
    """A step of two stages; the verdict, and how many calls of stages the check made."""
    os.environ |= {RUNS: "0", CALLS: "0"}
    stages = [Stage(size, 0), Stage(size, 1)]
    data = [(torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)) for _ in range(COUNT)]
    data[0] = data[0][0], torch.ones(ROWS, WIDTH)  # the first tells nothing
    losses = list[float]()
    with check_step(dict(enumerate(stages)), data, against=Composed(padded), rename="{}.{}".format) as check:
        for number, (x, target) in enumerate(data):
            before = [None if one.grad is None else one.grad.clone() for one in stages[0].parameters()]
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                passed = stages[0](x)
                given = passed.detach().requires_grad_()
                loss = padded(stages[1](given), target)
            losses.append(loss.item())
            (loss / COUNT).backward()
            passed.backward(given.grad)
            if number == lost:
                for one, was in zip(stages[0].parameters(), before, strict=True):
                    one.grad = was
        stages[0].first.weight.grad *= factor  # type: ignore[operator]  # it is there
        for stage in stages:
            stage.register_forward_pre_hook(lambda *_: os.environ.update({CALLS: f"{int(os.environ[CALLS]) + 1}"}))
        check.gradients()
        check.report(losses=losses)
    return check.verdict, int(os.environ[CALLS])


@pytest.mark.parametrize(
    ("size", "cast", "tier"), [(0.0, False, "bitwise"), (1e-7, False, "fp32"), (5e-3, True, "bf16")]
)
def test_each_call_is_rerun_once_and_rounding_measured_on_one_of_each_stage(
    size: float, cast: bool, tier: str, world: World
) -> None:
    ((verdict, calls),) = world.run(job, size, 1.0, None, cast, ranks=1)
    assert (verdict.verdict, verdict.tier) == ("pass", tier), str(verdict)
    assert (verdict.law("gradient").worst > 0) == (size > 0)
    assert 2 * COUNT <= calls <= 2 * COUNT + (2 * 4 if size else 0)


def test_kernels_that_differ_by_more_than_their_type_rounds_are_not_judged(world: World) -> None:
    ((verdict, _),) = world.run(job, 2e-4, 1.0, None, ranks=1)
    assert verdict.verdict == "unknown", str(verdict)


@pytest.mark.parametrize(("size", "factor", "cast"), [(1e-7, 1.001, False), (1e-5, 0.99, False), (5e-3, 1.2, True)])
def test_what_differs_by_more_than_runs_do_fails(size: float, factor: float, cast: bool, world: World) -> None:
    ((verdict, _),) = world.run(job, size, factor, None, cast, ranks=1)
    assert verdict.verdict == "fail", str(verdict)
    assert {(one.law, one.parameter) for one in verdict.mismatches} == {("gradient", "0.first.weight")}


@pytest.mark.parametrize(("size", "cast"), [(1e-7, False), (5e-3, True)])
def test_a_microbatch_that_is_lost_is_found(size: float, cast: bool, world: World) -> None:
    ((verdict, _),) = world.run(job, size, 1.0, 2, cast, ranks=1)
    assert verdict.verdict == "fail", str(verdict)
