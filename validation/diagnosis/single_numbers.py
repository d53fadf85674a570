"""Gradients of a single number, such as a gate's bias: each is a multiple of any other, so the others tell which."""

from collections.abc import Callable, Mapping, Sequence

from pipeproof.core.tolerance import error
from pipeproof.observers.likeness import Likeness
from pipeproof.reference.step import Gradient


def as_others(
    odd: Sequence[Likeness],
    seen: Mapping[str, Gradient],
    predicted: Callable[[str], Gradient],
    limits: Mapping[str, float],
) -> list[Likeness]:
    """``odd``, but single numbers as those multiples of what is ``predicted`` that others are, up to their limits."""
    factors = list(dict.fromkeys(one.factor for one in odd if one.kind == "multiple" and one.factor))
    found = []
    for one in odd:
        number, whole = seen[one.parameter], predicted(one.parameter)
        if number is not None and whole is not None and whole.numel() == 1:
            now, limit = number.double().cpu(), limits[one.parameter]
            fitting = (factor for factor in factors if error(now, factor * whole) <= limit)
            one = next((Likeness("multiple", one.at, factor=factor) for factor in fitting), one)
        found.append(one)
    return found
