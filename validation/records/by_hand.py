"""Losses that a job multiplies, and gradients that it divides by as much, where no scaler tells: both are seen."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from pipeproof.foreign.crossings import near
from pipeproof.foreign.own_links import OwnStage
from pipeproof.records.held_gradients import length_in_pieces
from pipeproof.records.rank_part import Rename
from pipeproof.reference.step import dense

_WHOLE = 1e-5  # how far, relative to its size, a factor may be from the whole number that it is taken for


def agreed_times(told: Sequence[float | None]) -> float | None:
    """What losses are multiplied by, of what last stages ``told``; None where they are not, or not all alike."""
    found = [one for one in told if one is not None]
    return _plain(found[0]) if found and all(near(one, found[0]) for one in found) else None


def sizes_seen(stages: Sequence[OwnStage], seen: Mapping[str, Any], rename: Rename, *, scaled: float) -> list[float]:
    """How large the gradients of ``stages`` are ``seen`` to be, in multiples of what flowed to their calls gives.

    Below zero are those that lead the other way.

    ``rename``: the model's names, by which they are seen. ``scaled``: what they are known to be divided by.
    """
    found = []
    for own in stages:
        if own.flowing and own.factor is None:
            continue  # what should have flowed there says nothing of what did
        pairs = [(own.gradients[name], seen.get(rename(own.stage, name))) for name in own.single_names]
        due = _length([one for one, _ in pairs]) * abs(own.factor or 1.0) / scaled
        here = _length([one for _, one in pairs])
        if due and here:
            found.append(math.copysign(here / due, _along(pairs) * (own.factor or 1.0)))
    return found


def are_divided(sizes: Sequence[float], times: float) -> bool:
    """Whether gradients of these ``sizes`` are divided by ``times``, rather than not: most, or any exactly.

    Nobody divides by such a number who does not mean it. Those of replicas are sums of several, and none is exact.
    """
    exactly = any(abs(one * times - 1.0) <= _WHOLE for one in sizes)
    divided = sum(_off(one * times) < _off(one) for one in sizes)
    return exactly or 2 * divided > len(sizes)


def by_hand(times: float) -> str:
    """That losses are multiplied so."""
    return f"losses were multiplied by {times:g} and gradients divided by it: that was taken as meant"


def _plain(factor: float) -> float:
    """``factor``, or the whole number that it is, or one part of which it is."""
    for plain in (round(factor), 1 / (round(1 / factor) or math.inf)):
        if plain and abs(factor - plain) <= _WHOLE * abs(factor):
            return float(plain)
    return factor


def _length(gradients: Sequence[Any]) -> float:
    there = [dense(one) for one in gradients if isinstance(one, Tensor)]
    return math.hypot(*map(length_in_pieces, there))


def _off(size: float) -> float:
    """How far it is from 1, either way."""
    return abs(math.log(size)) if size > 0 else math.inf


def _along(pairs: Sequence[tuple[Any, Any]]) -> float:
    """Whether the tensors of ``pairs`` lead along each other: their products, of those that are of one shape."""
    alike = [
        (dense(one).flatten().float(), dense(other).flatten().float())
        for one, other in pairs
        if isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape and not one.is_complex()
    ]
    return float(sum(one @ other for one, other in alike)) or 1.0
