"""Copies of a layer that stages share, and what each stage's own share in them is."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeproof.foreign import WhiteBox, watch
from tests.support.steps import loss_fn, pairs

WIDTH = 8


class Loop(nn.Module):
    """One layer at both ends, beside one in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.ends, self.middle = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.ends(torch.tanh(self.middle(torch.tanh(self.ends(x)))))
        return made


def build_loop() -> nn.Module:
    torch.manual_seed(0)
    return Loop()


class Ends(nn.Module):
    """A stage with a copy of the layer at both ends."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.ends = copy.deepcopy(model.ends)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.ends(x)
        return made


@pytest.mark.parametrize(
    ("first", "last", "kind"), [(0.0, 1.0, "tied-not-summed"), (1.0, 2.0, "tied-doubled")], ids=["lost", "twice"]
)
def test_shares_of_a_layer_at_both_ends_are_told_apart(
    whitebox: WhiteBox, first: float, last: float, kind: str
) -> None:
    def step(model: Any, microbatches: list[Any]) -> Any:
        begin, middle, end = map(watch, (Ends(model), model.middle, Ends(model)))
        losses = []
        for x, target in microbatches:
            losses.append(loss_fn(end(torch.tanh(middle(torch.tanh(begin(x))))), target))
            (losses[-1] / len(microbatches)).backward()
        for one, other in zip(begin.parameters(), end.parameters(), strict=True):
            one.grad = first * one.grad + last * other.grad  # type: ignore[operator]  # both have one
            other.grad = one.grad.clone()
        return [begin, middle, end], [loss.detach() for loss in losses]

    data = pairs(4, rows=6)
    verdict = whitebox.validate(step, reference=build_loop, microbatches=data, ranks=1, loss_fn=loss_fn)
    assert {cause.kind for cause in verdict.cause} == {kind}, str(verdict)
    shares = f"the share of stage 0 {first:g} times, the share of stage 2 {last:g} times"
    assert all(shares in cause.detail for cause in verdict.cause), str(verdict)
