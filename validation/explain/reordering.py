"""Detect a gradient with another's elements, rows or columns in a different order, beyond chance.

Numbers of one kind look alike when sorted, the more so the more there are: with coarse rounding, two unrelated
gradients may. So elements in their place count for nothing, and the others must exceed rounding by so much that no
choice among all orders of the kind would fit by chance.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from pipeproof.core.tolerance import error
from pipeproof.explain.limits import CLEARLY
from pipeproof.explain.solver import conclusive, orders


def is_reordered(observed: Tensor, says: Tensor, limit: float) -> bool:
    """True if ``observed`` reorders the elements or lines in ``says``, beyond chance."""
    one, two = (tensor.double().cpu() for tensor in (observed, says))
    if one.shape != two.shape or not two.any():
        return False
    return _simply(one, two, limit) or _elements(one.flatten(), two.flatten(), limit)


def _simply(observed: Tensor, says: Tensor, limit: float) -> bool:
    """True if a single step moves all elements: a shift, a reversal or a transposition."""
    wrong, ways = _wrong(observed, says, limit), math.log(says.numel() + says.dim() + 1)
    if not _no_chance(observed, says, wrong, ways, limit):
        return False
    return any(error(observed, made) <= limit for made in _shift(observed, says) if made.shape == observed.shape)


def _shift(observed: Tensor, says: Tensor) -> Iterator[Tensor]:
    """Yield ``says`` with the best shift, reversed along each dimension, and transposed."""
    one, two = (torch.fft.rfft(tensor.flatten()) for tensor in (observed, says))
    yield says.roll(int(torch.fft.irfft(one * two.conj(), n=says.numel()).argmax()))
    yield from (says.flip(dim) for dim in range(says.dim()))
    if says.dim() > 1:
        yield says.transpose(0, 1)


def _elements(observed: Tensor, says: Tensor, limit: float) -> bool:
    moved = _wrong(observed, says, limit)
    no_chance = _no_chance(observed, says, moved, orders(int(moved.sum())), limit)
    return no_chance and error(observed.sort()[0], says.sort()[0]) <= limit


def _no_chance(observed: Tensor, says: Tensor, wrong: Tensor, ways: float, limit: float) -> bool:
    """True if chance cannot make all ``wrong`` elements right in exp(``ways``) orders."""
    telling = wrong & (_telling(observed, says, limit) | _telling(says, says, limit))
    if not telling.any():
        return False
    chance = by_chance(observed - says, wrong, says, limit)
    return conclusive(int(telling.sum()), used=0, atoms=1, limit=chance, ways=ways)


def by_chance(gap: Tensor, wrong: Tensor, says: Tensor, limit: float) -> float:
    """Chance for an element as far off as the ``wrong`` elements to be right."""
    off = gap[wrong].square().mean().sqrt() / says.abs().max()
    return min(1.0, limit / off.item())


def _wrong(observed: Tensor, says: Tensor, limit: float) -> Tensor:
    return (observed - says).abs() > limit * says.abs().max()


def _telling(of: Tensor, says: Tensor, limit: float) -> Tensor:
    return of.abs() > CLEARLY * limit * says.abs().max()
