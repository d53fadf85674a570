"""What was done to a tensor on its way: as far as two sketches tell, and without which it is still known again."""

import math
from collections.abc import Mapping

from validation.observers.identity import What
from validation.observers.sketch import Sketch

_ROUNDED = 2.0**-7  # more than rounding to bfloat16 changes
_NEAR = 0.5  # a relative error with which more of a tensor is its own than is not
_APART = 4.0  # times as far away must all others be: a sketch's distance may be wrong by a factor of two


def rounded(seen: Sketch, expected: Sketch) -> bool:
    """Whether this is the expected tensor, gone through a narrower type."""
    return bool(seen.narrow) and not expected.narrow and seen.distance(expected) <= _ROUNDED


def changed(seen: Sketch, expected: Sketch) -> What | None:
    """What makes ``seen`` of ``expected``; None if that is nothing that a sketch can tell."""
    if rounded(seen, expected):
        return What("rounded", f"{seen.narrow}-rounded")
    factor = seen.factor(expected)
    if factor is not None:
        return What("multiple", f"{factor:.6g} times its own", factor=factor)
    if seen.is_reordered(expected):
        return What("reordered", "its own elements in another order")
    return None


def nearest(seen: Sketch, known: Mapping[int, Sketch]) -> int | None:
    """The number of the one tensor of ``known`` that ``seen`` is near, and none of the others by far; None if none."""
    distances = sorted((seen.distance(one), number) for number, one in known.items())
    (first, number), (second, _) = [*distances, (math.inf, -1), (math.inf, -1)][:2]
    return number if first <= _NEAR and _APART * first <= second else None


def recognised(seen: Sketch, known: Mapping[int, Sketch]) -> set[int]:
    """The numbers of those tensors of ``known`` of which ``seen`` was made by what is no exchange."""
    found = {number for number, one in known.items() if changed(seen, one) is not None}
    near = None if found else nearest(seen, known)
    return found if near is None else {near}
