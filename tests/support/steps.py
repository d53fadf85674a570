"""What a test of a step starts from, where it needs nothing of its own: microbatches, blocks in a row, and a loss."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 8
Pairs = list[tuple[Tensor, Tensor]]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """The mean square of what is off."""
    return (output - target).square().mean()


def pairs(count: int = 4, *, rows: int = 4, width: int = WIDTH, to: int | None = None, seed: int = 0) -> Pairs:
    """So many microbatches: inputs of this width, and targets of width ``to``."""
    draw = torch.Generator().manual_seed(seed)
    shapes = (rows, width), (rows, to or width)
    return [(torch.randn(shapes[0], generator=draw), torch.randn(shapes[1], generator=draw)) for _ in range(count)]


def backward(
    model: Callable[[Any], Any],
    microbatches: Sequence[tuple[Any, Any]],
    *,
    divisor: float | None = None,
    by: Callable[[Any, Any], Tensor] = loss_fn,
    skipped: Collection[int] = (),
) -> list[float]:
    """The losses of a plain loop; each is divided by ``divisor``, or by their number, before its backward."""
    losses = []
    for number, (inputs, target) in enumerate(microbatches):
        loss = by(model(inputs), target)
        losses.append(loss.item())
        if number not in skipped:
            (loss / (divisor or len(microbatches))).backward()
    return losses


def blocks(count: int = 4, *, width: int = WIDTH, seed: int = 0) -> nn.Sequential:
    """So many layers of one width, each with its tanh."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)))


def sgd(model: nn.Module, rate: float = 0.1, momentum: float = 0.0) -> torch.optim.Optimizer:
    """The plainest optimizer."""
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer with a state."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2)
