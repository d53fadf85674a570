"""Gradients of a single number, such as a gate's bias: each is a multiple of any other, so the others tell which."""

from collections.abc import Collection

from torch import Tensor

from pipeproof.judging.tolerance import error
from pipeproof.observers.likeness import Likeness


def as_others(
    odd: Likeness, seen: Tensor | None, whole: Tensor | None, limit: float, others: Collection[Likeness]
) -> Likeness:
    """``odd``, or, if it is one number, the multiple of ``whole`` that it is up to ``limit`` as one of ``others``."""
    if seen is None or whole is None or whole.numel() != 1:
        return odd
    factors = (one.factor for one in others if one.kind == "multiple" and one.factor)
    fitting = (one for one in factors if error(seen.double().cpu(), one * whole) <= limit)
    return next((Likeness("multiple", odd.at, factor=one) for one in fitting), odd)
