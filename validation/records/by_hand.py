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
    return _plain(found[0]) if found and found[0] > 0 and all(near(one, found[0]) for one in found) else None


def sizes_seen(stages: Sequence[OwnStage], seen: Mapping[str, Any], rename: Rename, *, scaled: float) -> list[float]:
    """How large the gradients of ``stages`` are ``seen`` to be, in multiples of what flowed to their calls gives.

    ``rename``: the model's names, by which they are seen. ``scaled``: what they are known to be divided by.
    """
    found = []
    for own in stages:
        if own.flowing and own.factor is None:
            continue  # what should have flowed there says nothing of what did
        due = _length([own.gradients[name] for name in own.single_names]) * abs(own.factor or 1.0) / scaled
        here = _length([seen.get(rename(own.stage, name)) for name in own.single_names])
        if due and here:
            found.append(here / due)
    return found


def are_divided(sizes: Sequence[float], times: float) -> bool:
    """Whether most gradients of these ``sizes`` are divided by ``times``, rather than not."""
    divided = sum(abs(math.log(one * times)) < abs(math.log(one)) for one in sizes)
    return 2 * divided > len(sizes)


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
