"""A tensor that a stage gave may be written to in place, also where it is a view, which then has another node."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof import watch
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from tests.support.pipeline_here import MSE, Job, Layer, Sent, checked
from tests.support.steps import backward, loss_fn

DATA = [
    (torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(m)), torch.full((2, 4, 8), m / 4)) for m in range(3)
]


def as_it_is(made: Tensor) -> Tensor:
    return made


def turned(made: Tensor) -> Tensor:
    return made.transpose(0, 1)


def cooled(output: Tensor, target: Tensor) -> Tensor:
    """A loss that writes to what it is given, as one that has little memory."""
    output.div_(2.0)
    return MSE(output, target.reshape(output.shape))


class Writing(Job):
    """Writes to what a stage gave before it is sent."""

    def _received(self, k: int, made: list[list[Tensor]], sent: Sent) -> list[Tensor]:
        made[-1][0].mul_(2.0).mul_(0.5)
        return super()._received(k, made, sent)


def verdict_of(then: Callable[[Tensor], Tensor], *, flat: bool = False, **more: Any) -> Verdict:
    """Of a step whose last stage gives what ``then`` makes of its layer's, to which the loss writes."""
    torch.manual_seed(0)
    data: list[tuple[Any, Any]] = [(x.flatten(0, 1), y.flatten(0, 1)) for x, y in DATA] if flat else DATA
    return checked(Writing([Layer(as_it_is), Layer(then)], data, cooled, **more))


@pytest.mark.parametrize("then", [as_it_is, turned, torch.sin])
@pytest.mark.parametrize("flat", [False, True])
def test_gradients_come_by_what_it_is_a_view_of(then: Callable[[Tensor], Tensor], flat: bool) -> None:
    verdict = verdict_of(then, flat=flat)
    assert verdict.outcome == "pass", str(verdict)


class Joined(Layer):
    def forward(self, x: Tensor, *others: Tensor, **named: Tensor) -> Any:
        return super().forward(torch.cat([x, *others], -1))


def halves(made: Tensor) -> tuple[Tensor, Tensor]:
    return made[..., :4], made[..., 4:]


def written(made: Tensor) -> tuple[Tensor, Tensor]:
    first, second = halves(made)
    return first.mul_(2.0), second


@pytest.mark.parametrize("then", [halves, written])
def test_each_view_of_one_tensor_gets_its_own(then: Callable[[Tensor], Any]) -> None:
    """Who writes to one of them takes both out of the graph."""
    torch.manual_seed(0)
    verdict = checked(Writing([Layer(as_it_is), Layer(then), Joined()], DATA))
    assert verdict.outcome == "pass", str(verdict)


class Cat(nn.Module):
    def forward(self, parts: tuple[Tensor, Tensor]) -> Tensor:
        return torch.cat(parts, -1)


def test_a_reference_may_write_to_one_of_two_views(whitebox_here: WhiteBox) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(Layer(written), Cat())

    verdict = whitebox_here.validate(
        lambda model, microbatches: (model, backward(watch(model), microbatches)),
        reference=build,
        microbatches=DATA,
        ranks=1,
        loss_fn=loss_fn,
    )
    assert verdict.outcome == "pass", str(verdict)


def twice(given: Tensor, output: Tensor, target: Tensor) -> None:
    loss = cooled(output, target) / len(DATA)
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize(("fault", "cause"), [({"times": 2.0}, "scale"), ({"end": twice}, "doubled")])
def test_a_fault_there_is_told(fault: dict[str, Any], cause: str) -> None:
    verdict = verdict_of(as_it_is, **fault)
    assert verdict.outcome == "fail", str(verdict)
    assert verdict.causes[0].kind == cause, str(verdict)
