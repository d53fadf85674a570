"""What is this tensor instead of what it should be, as far as sketches of both tell."""

import math
from collections.abc import Mapping

from pipeproof.core.observe.likeness import Label, Likeness
from pipeproof.core.observe.sketch import Sketch
from pipeproof.explain.limits import CLEARLY, HALF, ROUNDED


def of_sketches(seen: Sketch, due: Sketch, at: Label | None = None) -> Likeness | None:
    """What makes ``seen`` of ``due``; None if that is nothing that a sketch can tell."""
    if is_rounded_sketch(seen, due):
        return Likeness("rounded", at, narrow=seen.narrow)
    factor = seen.factor(due)
    if factor is not None and abs(factor - 1.0) > CLEARLY * max(seen.limit, due.limit):
        return Likeness("multiple", at, factor=factor)
    return Likeness("reordered", at, line="element") if seen.is_reordered(due) else None


def is_rounded_sketch(seen: Sketch, due: Sketch) -> bool:
    """Whether this is the due tensor, gone through a narrower type."""
    return bool(seen.narrow) and not due.narrow and seen.distance(due) <= ROUNDED


def nearest_sketch(seen: Sketch, known: Mapping[int, Sketch]) -> int | None:
    """The number of the one tensor of ``known`` that ``seen`` is near, and none of the others by far; None if none."""
    distances = sorted((seen.distance(one), number) for number, one in known.items())
    (first, number), (second, _) = [*distances, (math.inf, -1), (math.inf, -1)][:2]
    return number if first <= HALF and CLEARLY * first <= second else None


def is_far_nearer(seen: Sketch, one: Sketch, other: Sketch) -> bool:
    """Whether ``seen`` is so much nearer to ``one`` than to ``other`` that sketches tell it."""
    return CLEARLY * seen.distance(one) <= seen.distance(other)


def recognised(seen: Sketch, known: Mapping[int, Sketch]) -> set[int]:
    """The numbers of those tensors of ``known`` of which ``seen`` was made by what is no exchange."""
    found = {number for number, one in known.items() if of_sketches(seen, one) is not None}
    near = None if found else nearest_sketch(seen, known)
    return found if near is None else {near}
