"""Whether a gradient is another one but for the order of its elements, its rows or its columns, and not by chance.

Numbers of one kind look alike when sorted, the more so the more there are: where rounding leaves much, as in a coarse
type, two gradients that have nothing to do with each other may. So what is in its place already says nothing, and what
is not must be off by so much more than rounding that no choice among all orders of the kind would fit by chance.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from pipeproof.core.tolerance import error
from pipeproof.explain.limits import CLEARLY
from pipeproof.explain.solver import conclusive, orders


def reordered(seen: Tensor, says: Tensor, limit: float) -> bool:
    """Whether ``seen`` is ``says`` but for the order of its elements, or of lines of it, where that is no chance."""
    one, two = (tensor.double().cpu() for tensor in (seen, says))
    if one.shape != two.shape or not two.any():
        return False
    return _simply(one, two, limit) or _elements(one.flatten(), two.flatten(), limit)


def _simply(seen: Tensor, says: Tensor, limit: float) -> bool:
    """Whether a single step that moves all elements alike makes it: they are shifted, reversed or transposed."""
    wrong, ways = _wrong(seen, says, limit), math.log(says.numel() + says.dim() + 1)
    if not _no_chance(seen, says, wrong, ways, limit):
        return False
    return any(error(seen, made) <= limit for made in _moved(seen, says) if made.shape == seen.shape)


def _moved(seen: Tensor, says: Tensor) -> Iterator[Tensor]:
    """``says`` shifted by what makes it most like ``seen``, reversed along each dimension, and transposed."""
    one, two = (torch.fft.rfft(tensor.flatten()) for tensor in (seen, says))
    yield says.roll(int(torch.fft.irfft(one * two.conj(), n=says.numel()).argmax()))
    yield from (says.flip(dim) for dim in range(says.dim()))
    if says.dim() > 1:
        yield says.transpose(0, 1)


def _elements(seen: Tensor, says: Tensor, limit: float) -> bool:
    moved = _wrong(seen, says, limit)
    no_chance = _no_chance(seen, says, moved, orders(int(moved.sum())), limit)
    return no_chance and error(seen.sort()[0], says.sort()[0]) <= limit


def _no_chance(seen: Tensor, says: Tensor, wrong: Tensor, ways: float, limit: float) -> bool:
    """Whether none of so many orders, in logarithm, would make all that is ``wrong`` right by chance."""
    telling = wrong & (_telling(seen, says, limit) | _telling(says, says, limit))
    if not telling.any():
        return False
    chance = by_chance(seen - says, wrong, says, limit)
    return conclusive(int(telling.sum()), used=0, atoms=1, limit=chance, ways=ways)


def by_chance(gap: Tensor, wrong: Tensor, says: Tensor, limit: float) -> float:
    """How often an element that is off like the ``wrong`` ones would be right by chance."""
    off = gap[wrong].square().mean().sqrt() / says.abs().max()
    return min(1.0, limit / off.item())


def _wrong(seen: Tensor, says: Tensor, limit: float) -> Tensor:
    return (seen - says).abs() > limit * says.abs().max()


def _telling(of: Tensor, says: Tensor, limit: float) -> Tensor:
    return of.abs() > CLEARLY * limit * says.abs().max()
