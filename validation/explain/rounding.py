"""Whether a tensor is another one in a narrower type, at whatever scale that was.

A gradient is often multiplied before it is sent in a narrow type, and divided afterwards. What is left of it are the
values of that type times one number: so many significant bits, or, where they were too small for those, so many steps
of one size.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pipeproof.core.tolerance import error
from pipeproof.explain.limits import ALIKE, FEW, LEFT, MANY, MOST, ROUNDED, TELLING
from pipeproof.observers.likeness import NARROWER, ROUNDED_TO

_BITS = {"fp16": 11, "bf16": 8}
_STEPS = 2**13  # of one size up to the largest element
_BINADES = 4  # below the largest element: further down fp16 may have fewer bits

_CHANCE = 1e-4  # how likely numbers may be to lie on a grid, or beside it, by chance


@dataclass(frozen=True)
class Rounded:
    """To which narrower type, and, where at another scale, how wide its steps are there; or to steps of one size."""

    narrow: str = ""
    step: float | None = None


def rounded_as(seen: Tensor, whole: Tensor) -> Rounded | None:
    """How ``seen`` is ``whole`` rounded; None where it is not."""
    floating = seen.is_floating_point() and whole.is_floating_point()
    if not floating or seen.shape != whole.shape or torch.equal(seen, whole):
        return None
    for name, dtype in ROUNDED_TO.items():
        allowed = max(ROUNDED, 2 * torch.finfo(dtype).eps)
        told = _holds(seen, dtype) and not _narrow(whole) and _needs_more(whole, dtype)
        if told and 0.0 < error(seen, whole) <= allowed:
            return Rounded(name)
    wide = all(dtype.itemsize < seen.dtype.itemsize for dtype in NARROWER.values()) and seen.dtype == whole.dtype
    if not wide or not bool(seen.isfinite().all()):
        return None
    return _at_some_scale(seen.flatten().double(), whole.flatten().double())


def added_up_in(seen: Tensor, parts: Sequence[Tensor], narrow: str) -> bool | None:
    """Whether ``seen`` is ``parts``, one after another, added up in that type, to the bit; None where it is not.

    False: it is their sum, rounded once, just as well.
    """
    dtype = NARROWER[narrow]
    total, whole = parts[0].to(dtype), torch.stack([part.double() for part in parts]).sum(dim=0)
    for part in parts[1:]:
        total = total + part.to(dtype)
    if not torch.equal(seen.double(), total.double()):
        return None
    return not torch.equal(total, whole.to(dtype))


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


def _at_some_scale(seen: Tensor, whole: Tensor) -> Rounded | None:
    """Both (D). The largest element is a whole number of steps in any type; each such number gives a scale to try."""
    if (seen - whole).norm() > TELLING * whole.norm():
        return None
    largest = seen.abs().max()
    some = {*seen.abs()[:: max(1, len(seen) // MOST)].tolist()}  # what is there often tells no more than once
    size = torch.tensor(sorted(some, reverse=True), dtype=torch.float64)
    size = size[size > 0]
    top = size[size > largest / 2**_BINADES]
    for name, bits in _BITS.items():
        steps = largest / torch.arange(2 ** (bits - 1), 2**bits, dtype=torch.float64)
        width = partial(_floating, bits=bits)
        for step in _fitting(top, steps, width):
            if _off(seen, whole, width(whole.abs(), step)):
                return Rounded(name, step.item())
    steps = largest / torch.arange(1, _STEPS + 1, dtype=torch.float64)
    for step in _fitting(size, steps, lambda size, step: step):
        # Above its smallest numbers fp16 has steps that grow with what is rounded.
        if _off(seen, whole, _floating(whole.abs(), step, _BITS["fp16"]).clamp_min(step)):
            return Rounded(step=step.item())
    return None


def _fitting(size: Tensor, steps: Tensor, width: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Those of ``steps`` (K), the widest first, of which all of ``size`` (N) are whole multiples.

    ``width``: how far apart values lie around a size, by a step. A few sizes leave few steps for all to be tried with.
    """
    if len(size) < MANY // 2:
        return steps[:0]
    for some in (size[:FEW], size):
        counts = some[None] / width(some[None], steps[:, None])  # (K, N)
        steps = steps[((counts - counts.round()).abs() <= ALIKE).all(dim=1)]
    return steps


def _floating(size: Tensor, step: Tensor, bits: int) -> Tensor:
    """How far apart values of so many bits lie around ``size``, where ``step`` is that in the topmost binade."""
    top = 2.0 ** (bits - 1)
    return step * 2.0 ** (size.clamp_min(1e-300) / step / top).log2().floor()


def _off(seen: Tensor, whole: Tensor, widths: Tensor) -> bool:
    """Whether ``seen`` lies no further from ``whole`` than half a step, and many elements are not just that."""
    gap = (seen - whole).abs()
    beside = int((gap > widths * ALIKE).sum())
    return bool((gap <= widths * (0.5 + ALIKE)).all()) and _is_no_chance(beside, int(whole.count_nonzero()))
