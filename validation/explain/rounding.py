"""Detect a tensor rounded to a narrower type."""

import math

import torch
from torch import Tensor

from pipeproof.core.observe.likeness import NARROWER, ROUNDED_TO
from pipeproof.core.tolerance import error
from pipeproof.explain.limits import LEFT, ROUNDED

_CHANCE = 1e-4  # how likely numbers may be to lie on a grid, or beside it, by chance


def find_rounding(observed: Tensor, whole: Tensor) -> str:
    """Return the narrower type if ``observed`` equals ``whole`` rounded; else empty."""
    floating = observed.is_floating_point() and whole.is_floating_point()
    if not floating or observed.shape != whole.shape or torch.equal(observed, whole):
        return ""
    for name, dtype in ROUNDED_TO.items():
        allowed = max(ROUNDED, 2 * torch.finfo(dtype).eps)
        fits = _holds(observed, dtype) and not _narrow(whole) and _needs_more(whole, dtype)
        if fits and 0.0 < error(observed, whole) <= allowed:
            return name
    return ""


def _holds(tensor: Tensor, dtype: torch.dtype) -> bool:
    """True if a narrower ``dtype`` represents ``tensor`` exactly."""
    return dtype.itemsize < tensor.dtype.itemsize and torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)


def _narrow(tensor: Tensor) -> bool:
    """True if every element fits a narrow type."""
    return any(torch.equal(tensor.to(dtype).to(tensor.dtype), tensor) for dtype in NARROWER.values())


def _needs_more(tensor: Tensor, dtype: torch.dtype) -> bool:
    """True if so many elements need more digits than ``dtype`` that chance cannot make all fit."""
    return _is_no_chance(int((tensor.to(dtype).to(tensor.dtype) != tensor).sum()), int(tensor.count_nonzero()))


def _is_no_chance(count: int, of: int) -> bool:
    """True if chance would hardly put all numbers on a grid, with ``count`` among them beside it.

    Sums of coarse numbers mostly lie on it.
    """
    of = max(of, count)  # where zeros lie beside it, too
    return 0 < count and of * math.log((of - count + LEFT) / of) <= math.log(_CHANCE)
