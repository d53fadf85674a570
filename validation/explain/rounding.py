"""Whether a tensor is another one in a narrower type."""

import math

import torch
from torch import Tensor

from pipeproof.core.observe.likeness import NARROWER, ROUNDED_TO
from pipeproof.core.tolerance import error
from pipeproof.explain.limits import LEFT, ROUNDED

_CHANCE = 1e-4  # how likely numbers may be to lie on a grid, or beside it, by chance


def rounded_as(seen: Tensor, whole: Tensor) -> str:
    """The narrower type to which ``seen`` is ``whole`` rounded; empty where it is not."""
    floating = seen.is_floating_point() and whole.is_floating_point()
    if not floating or seen.shape != whole.shape or torch.equal(seen, whole):
        return ""
    for name, dtype in ROUNDED_TO.items():
        allowed = max(ROUNDED, 2 * torch.finfo(dtype).eps)
        told = _holds(seen, dtype) and not _narrow(whole) and _needs_more(whole, dtype)
        if told and 0.0 < error(seen, whole) <= allowed:
            return name
    return ""


def _holds(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether ``dtype``, narrower than its own, can say all of ``tensor``."""
    return dtype.itemsize < tensor.dtype.itemsize and torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)


def _narrow(tensor: Tensor) -> bool:
    """Whether every element is a number of a narrow type, as in a tensor of that type."""
    return any(torch.equal(tensor.to(dtype).to(tensor.dtype), tensor) for dtype in NARROWER.values())


def _needs_more(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether so many of its elements have more digits than ``dtype`` that it is no chance if all have no more."""
    return _is_no_chance(int((tensor.to(dtype).to(tensor.dtype) != tensor).sum()), int(tensor.count_nonzero()))


def _is_no_chance(count: int, of: int) -> bool:
    """Whether numbers among which ``count`` of so many lie beside a grid would hardly all lie on it: sums of coarse
    numbers mostly do."""
    of = max(of, count)  # where zeros lie beside it, too
    return 0 < count and of * math.log((of - count + LEFT) / of) <= math.log(_CHANCE)
