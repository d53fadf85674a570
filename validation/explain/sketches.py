"""Identify a wrong tensor from sketches alone."""

import math
from collections.abc import Mapping

from pipeproof.core.observe.likeness import Likeness
from pipeproof.core.observe.sketch import Sketch
from pipeproof.explain.limits import CLEARLY, HALF, ROUNDED


def of_sketches(observed: Sketch, expected: Sketch) -> Likeness | None:
    """Find the change from ``expected`` to ``observed``, if sketches show it."""
    if is_rounded_sketch(observed, expected):
        return Likeness("rounded", narrow=observed.narrow)
    factor = observed.factor(expected)
    if factor is not None and abs(factor - 1.0) > CLEARLY * max(observed.limit, expected.limit):
        return Likeness("multiple", factor=factor)
    return Likeness("reordered", line="element") if observed.is_reordered(expected) else None


def is_rounded_sketch(observed: Sketch, expected: Sketch) -> bool:
    """True for the expected tensor after a narrower type."""
    return bool(observed.narrow) and not expected.narrow and observed.distance(expected) <= ROUNDED


def nearest_sketch(observed: Sketch, known: Mapping[int, Sketch]) -> int | None:
    """Return the only number in ``known`` near ``observed``, by far; or None."""
    distances = sorted((observed.distance(one), number) for number, one in known.items())
    (first, number), (second, _) = [*distances, (math.inf, -1), (math.inf, -1)][:2]
    return number if first <= HALF and CLEARLY * first <= second else None


def is_far_nearer(observed: Sketch, one: Sketch, other: Sketch) -> bool:
    """True if ``observed`` lies clearly nearer to ``one`` than to ``other``."""
    return CLEARLY * observed.distance(one) <= observed.distance(other)


def recognise(observed: Sketch, known: Mapping[int, Sketch]) -> set[int]:
    """Numbers in ``known`` that became ``observed`` without an exchange."""
    found = {number for number, one in known.items() if of_sketches(observed, one) is not None}
    near = None if found else nearest_sketch(observed, known)
    return found if near is None else {near}
