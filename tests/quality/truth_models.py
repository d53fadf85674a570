"""Models, data and losses that the truth test runs on."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import watch

RANKS, WIDTH, ROWS, COUNT, LAYERS = 4, 16, 4, 8, 8

Pairs = list[Any]
Build = Callable[[], nn.Module]


class Chain(nn.Sequential):
    """Layers in a row: the first is called with all that there is, each other with what the one before made."""

    def forward(self, *given: Any) -> Any:
        """What the last layer makes."""
        for layer in self:
            given = (layer(*given),)
        return given[0]


class Block(nn.Module):
    """x + gelu(linear(norm(x)))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + nn.functional.gelu(self.linear(self.norm(x)))


def blocks(kind: Build = Block, count: int = LAYERS) -> list[nn.Module]:
    """So many of one kind."""
    return [kind() for _ in range(count)]


def of(kind: Build = Block, *ends: Build, count: int = LAYERS) -> Build:
    """A builder of a chain: ``count`` layers, the last of which are ``ends``, and all others of one kind."""
    return lambda: Chain(*blocks(kind, count - len(ends)), *(end() for end in ends))


def seeded(build: Build) -> Build:
    """``build``, drawn from one seed."""

    def built() -> nn.Module:
        torch.manual_seed(0)
        return build()

    return built


build_model = seeded(lambda: nn.Sequential(*blocks()))


def data_of(
    shape: tuple[int, ...] = (ROWS, WIDTH),
    *,
    count: int = COUNT,
    dtype: torch.dtype = torch.float32,
    seed: int = 1,
    sides: bool = False,
) -> Pairs:
    """Pairs of inputs and target; ``sides``: the inputs are two tensors."""
    draw = torch.Generator().manual_seed(seed)

    def one() -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    return [((one(), one()) if sides else one(), one()) for _ in range(count)]


def some(*sizes: int) -> Pairs:
    """Microbatches of these numbers of rows."""
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(n, WIDTH, generator=draw), torch.randn(n, WIDTH, generator=draw)) for n in sizes]


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """A mean over all elements."""
    return nn.functional.mse_loss(output, target)


def _sgd(model: nn.Module, *, rate: float = 0.1, momentum: float = 0.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


OPTIMIZERS: Mapping[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": _sgd,
    "slow sgd": partial(_sgd, rate=0.005),
    "momentum": partial(_sgd, momentum=0.9),
    "adam": _adam,
}


def observed(module: nn.Module, watched: bool) -> nn.Module:
    """``module``, watched or not."""
    return watch(module) if watched else module


def squares(module: nn.Module) -> Tensor:
    """The sum of the squares of all gradients, in fp64."""
    found = [p.grad.double().square().sum() for p in module.parameters() if p.grad is not None]
    return torch.stack(found).sum() if found else torch.zeros((), dtype=torch.float64)


class Place:
    """Where a part of a runtime is, and which fault it has."""

    def __init__(self, fault: str) -> None:
        self.fault, self.rank, self.ranks = fault, dist.get_rank(), dist.get_world_size()
        self.last = self.ranks - 1

    def at(self, fault: str, *ranks: int) -> bool:
        return self.fault == fault and self.rank in ranks


def through(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """What goes through a narrower type."""
    return lambda tensor: tensor.to(dtype).to(tensor.dtype)
