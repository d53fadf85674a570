"""What a test of a step starts from, where it needs nothing of its own: microbatches, blocks in a row, and a loss."""

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


def blocks(count: int = 4, *, width: int = WIDTH, seed: int = 0) -> nn.Sequential:
    """So many layers of one width, each with its tanh."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)))
