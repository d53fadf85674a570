"""A loss that is run again leaves what its modules keep as it was, wherever it has them."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from pipeproof.reference.loss_state import buffers_kept


class Usual(nn.Module):
    """A loss in multiples of the usual one: one buffer is written to, another made anew."""

    usual: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("usual", torch.ones(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(output, target)
        self.usual.lerp_(loss.detach(), 0.5)
        self.calls = self.calls + 1
        return loss / self.usual

    def weighed(self, output: Tensor, target: Tensor, *, by: float) -> Tensor:
        found: Tensor = self(output, target) * by
        return found


class Holder:
    """A job whose method the loss is."""

    def __init__(self, losses: list[Usual]) -> None:
        self.losses = losses

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        found: Tensor = self.losses[0](output, target)
        return found


LOSS = Usual()
Loss = Callable[[Tensor, Tensor], Tensor]
LOSSES: dict[str, Callable[[Usual], Loss]] = {
    "itself": lambda usual: usual,
    "a method, in part": lambda usual: partial(usual.weighed, by=2.0),
    "closed over": lambda usual: lambda output, target: usual(output, target),
    "a member's": lambda usual: Holder([usual]).loss,
}


@pytest.mark.parametrize("where", LOSSES)
def test_buffers_of_a_loss_are_as_they_were(where: str) -> None:
    usual = Usual()
    own = usual.usual
    with buffers_kept(LOSSES[where](usual)):
        usual(torch.ones(2), torch.zeros(2) + 3)
        assert usual.usual != 1, "the loss changed it"
    assert usual.usual is own
    assert (float(usual.usual), float(usual.calls)) == (1.0, 0.0)


def test_a_module_that_is_called_by_name_is_found() -> None:
    with buffers_kept(lambda output, target: LOSS(output, target)):
        LOSS(torch.ones(2), torch.zeros(2))
    assert float(LOSS.calls) == 0.0


def test_a_function_without_modules_has_nothing_to_keep() -> None:
    with buffers_kept(nn.functional.mse_loss):
        pass
