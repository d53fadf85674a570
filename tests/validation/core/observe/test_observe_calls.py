"""A tensor that a stage gave may be written to in place, also where it is a view, which then has another node."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from pipeproof.core.verdict import Verdict
from pipeproof.records.step_check import check_step
from pipeproof.wings.composed import StageByStage
from tests.support.pipeline_here import MSE, Layer

DATA = [
    (torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(m)), torch.full((2, 4, 8), m / 4)) for m in range(3)
]
PART = 1 / len(DATA)


def as_it_is(made: Tensor) -> Tensor:
    return made


def turned(made: Tensor) -> Tensor:
    return made.transpose(0, 1)


def cooled(output: Tensor, target: Tensor) -> Tensor:
    """A loss that writes to what it is given, as one that has little memory."""
    output.div_(2.0)
    return MSE(output, target.reshape(output.shape))


def verdict_of(
    then: Callable[[Tensor], Tensor], *, times: float = 1.0, backwards: int = 1, flat: bool = False
) -> Verdict:
    """Of a step whose last stage gives what ``then`` makes of its layer's, to which the loss writes."""
    torch.manual_seed(0)
    stages = [Layer(as_it_is), Layer(then)]
    data: list[tuple[Any, Any]] = [(x.flatten(0, 1), y.flatten(0, 1)) for x, y in DATA] if flat else DATA
    with check_step(dict(enumerate(stages)), data, against=StageByStage(cooled), rename="{}.{}".format) as check:
        for x, target in data:
            gave = stages[0](x)
            gave.mul_(2.0).mul_(0.5)
            given = gave.detach().requires_grad_()
            output = stages[1](given)
            loss = cooled(output, target) * PART * times
            for k in range(backwards):
                loss.backward(retain_graph=k + 1 < backwards)
            gave.backward(given.grad)
        check.gradients()
    return check.verdict


@pytest.mark.parametrize("then", [as_it_is, turned, torch.sin])
@pytest.mark.parametrize("flat", [False, True])
def test_gradients_come_by_what_it_is_a_view_of(then: Callable[[Tensor], Tensor], flat: bool) -> None:
    verdict = verdict_of(then, flat=flat)
    assert verdict.outcome == "pass", str(verdict)


class Halves(Layer):
    """Gives two views of one tensor."""

    def forward(self, x: Tensor, *others: Tensor, **named: Tensor) -> Any:
        made = self.layer(x)
        return made[..., :4], made[..., 4:]


class Joined(Layer):
    def forward(self, x: Tensor, *others: Tensor, **named: Tensor) -> Any:
        return self.layer(torch.cat([x, *others], -1))


def test_each_view_of_one_tensor_gets_its_own() -> None:
    """Who writes to one of them takes both out of the graph."""
    torch.manual_seed(0)
    stages = [Layer(), Halves(), Joined()]
    with check_step(dict(enumerate(stages)), DATA, against=StageByStage(MSE), rename="{}.{}".format) as check:
        for x, target in DATA:
            gave = stages[0](x)
            given = gave.detach().requires_grad_()
            halves = stages[1](given)
            halves[0].mul_(2.0).mul_(0.5)
            received = [one.detach().requires_grad_() for one in halves]
            (MSE(stages[2](*received), target) * PART).backward()
            torch.autograd.backward(halves, [one.grad for one in received])
            gave.backward(given.grad)
        check.gradients()
    assert check.verdict.outcome == "pass", str(check.verdict)


@pytest.mark.parametrize(("times", "backwards", "cause"), [(2.0, 1, "scale"), (1.0, 2, "doubled")])
def test_a_fault_there_is_told(times: float, backwards: int, cause: str) -> None:
    verdict = verdict_of(as_it_is, times=times, backwards=backwards)
    assert verdict.outcome == "fail", str(verdict)
    assert verdict.causes[0].kind == cause, str(verdict)
