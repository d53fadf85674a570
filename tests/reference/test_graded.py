"""Gradients that code writes past autograd are those of the reference too."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof.foreign import WhiteBox
from pipeproof.reference.graded import graded
from tests.support.golden import golden
from tests.support.two_ranks import WIDTH, judged, model_of, named, passes, step, without_second


class _Writes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer, ctx.to = layer, (weight, bias)
        return x @ layer.weight.detach().T + layer.bias.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,), layer = ctx.saved_tensors, ctx.layer
        made = gradient.T @ x, gradient.sum(0)
        for given, own, one in zip(ctx.to, (layer.weight, layer.bias), made, strict=True):
            to = own if given is None else given
            to.grad = one if to.grad is None else to.grad + one
        return gradient @ layer.weight, None, None, None


class ToArguments(nn.Linear):
    """Writes to the weights that it was called with."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Writes.apply(x, self, self.weight, self.bias)
        return result


class ToItsOwn(nn.Linear):
    """Writes to the weights that the module has when the backward runs, which autograd does not know of."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Writes.apply(x if x.requires_grad else x.requires_grad_(), self, None, None)
        return result


class Keeps(nn.Linear):
    """Its gradients are nowhere when the backward is over."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x if x.requires_grad else x.requires_grad_(), self.weight.detach())


def written(layer: type[nn.Linear]) -> nn.Sequential:
    return model_of(lambda: nn.Sequential(layer(WIDTH, WIDTH), nn.Tanh()))


@pytest.mark.parametrize("layer", [ToArguments, ToItsOwn])
def test_a_reference_that_writes_gradients_itself_has_them(whitebox: WhiteBox, layer: type[nn.Linear]) -> None:
    assert passes(judged(whitebox, step, partial(written, layer))).law("gradient").checked == 16 // 2
    found = named(judged(whitebox, partial(step, call=without_second), partial(written, layer)))
    assert found[0] == ("dropped", 0, 0, (2,)), found


def test_a_reference_without_any_gradient_fails_nothing(whitebox: WhiteBox) -> None:
    def full(model: nn.Sequential, microbatches: list[Any]) -> Any:
        handed = step(model, microbatches)
        for parameter in handed[0].parameters():
            parameter.grad = torch.ones_like(parameter)
        return handed

    verdict = judged(whitebox, full, partial(written, Keeps))
    assert verdict.verdict == "unknown"
    golden(verdict.headline)


def test_what_an_objective_reaches_past_its_leaves_stays_as_it_was() -> None:
    own, outside = nn.Parameter(torch.tensor([2.0])), nn.Parameter(torch.tensor([3.0]))
    outside.grad = torch.tensor([5.0])
    leaf = own.detach().requires_grad_()
    (found,) = graded((leaf * outside + own * 7).sum(), [leaf], [own])
    assert found is not None
    assert found.tolist() == [10.0]  # 3 through the leaf, 7 past it
    assert (own.grad, outside.grad.tolist()) == (None, [5.0])


def test_a_graph_of_a_very_long_chain_ends_no_process() -> None:
    """Torch frees such a graph only where Python did not walk all of it."""
    weight = torch.ones(1, requires_grad=True)
    made = weight * 1
    for _ in range(60_000):
        made = made * 1.0
    (found,) = graded(made, [weight], [weight])
    assert found is not None
    assert found.tolist() == [1.0]
    del made
