"""Models, data and losses that the truth test runs on."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof import watch

RANKS, WIDTH, ROWS, COUNT, LAYERS = 4, 16, 4, 8, 8

Pairs = list[Any]


class Block(nn.Module):
    """x + gelu(linear(norm(x)))."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + nn.functional.gelu(self.linear(self.norm(x)))
        return y


def build_model() -> nn.Sequential:
    """Eight blocks, drawn from one seed."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(LAYERS)))


def data(count: int = COUNT) -> Pairs:
    """So many pairs of inputs and target."""
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(ROWS, WIDTH, generator=draw), torch.randn(ROWS, WIDTH, generator=draw)) for _ in range(count)]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """A mean over all elements."""
    return nn.functional.mse_loss(output, target)


def observed(module: nn.Module, watched: bool) -> nn.Module:
    """``module``, watched or not."""
    return watch(module) if watched else module


def gradients(module: nn.Module) -> list[Tensor]:
    """Every gradient that there is."""
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def squares(modules: list[nn.Module]) -> Tensor:
    """The sum of the squares of all gradients, in fp64."""
    found = [gradient.double().square().sum() for module in modules for gradient in gradients(module)]
    return torch.stack(found).sum() if found else torch.zeros((), dtype=torch.float64)


def halves_to_zero(tensor: Tensor) -> Tensor:
    """``tensor`` with its second half zero."""
    out = tensor.clone()
    out.view(-1)[out.numel() // 2 :] = 0
    return out


def through(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """What goes through a narrower type."""
    return lambda tensor: tensor.to(dtype).to(tensor.dtype)
