"""Losses that a job multiplies, and gradients that it divides by as much, where no scaler tells: both are seen."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from pipeproof.foreign.crossings import near
from pipeproof.foreign.own_links import OwnStage
from pipeproof.judging.ledger import Ledger
from pipeproof.observers.sketch import Sketch, sketch
from pipeproof.records.own_shards import OwnShards
from pipeproof.records.rank_part import Rename
from pipeproof.reference.step import dense

_WHOLE = 1e-5  # how far, relative to its size, a factor may be from the whole number that it is taken for


def agreed_times(told: Sequence[float | None]) -> float | None:
    """What losses are multiplied by, of what last stages ``told``; None where they are not, or not all alike."""
    found = [one for one in told if one is not None]
    return _plain(found[0]) if found and all(near(one, found[0]) for one in found) else None


@dataclass(frozen=True)
class Addends:
    """What a rank's calls of a ``stage`` give to its gradients, and what it has of these, by parameter.

    ``given``: of what flowed to the calls; None where nobody knows what that gives. ``seen``: by where it lies in the
    whole, if it is a part.
    """

    stage: int
    given: Mapping[str, Sketch] | None
    seen: Mapping[tuple[str, str], Sketch]


def addends_of(
    stages: Sequence[OwnStage], seen: Mapping[str, Tensor | None], rename: Rename, shards: OwnShards
) -> list[Addends]:
    """Those of a rank's ``stages``. ``rename``: the model's names, by which gradients are ``seen``."""
    found = []
    for own in stages:
        names = {name: rename(own.stage, name) for name in own.single_names}
        given = {full: one for name, full in names.items() if (one := own.gradients[name]) is not None}
        known = None if own.flowing and own.factor is None else {n: _sketch(one, own) for n, one in given.items()}
        placed = {name: shards.in_place(name, seen.get(name)) for name in given}
        parts = {(name, shards.lies(name)): sketch(dense(one)) for name, one in placed.items() if one is not None}
        found.append(Addends(own.stage, known, parts))
    return found


def sizes_of(every: Sequence[Addends], *, together: int) -> list[float]:
    """How large the gradients of stages are, in multiples of what all their ranks' calls give.

    Below zero are those that lead the other way. Of ``every`` rank, so many ``together`` are one replica, and give all
    that it gives.
    """
    found = []
    for stage in dict.fromkeys(one.stage for one in every):
        ranks = [one for one in every if one.stage == stage]
        if any(one.given is None for one in ranks):
            continue  # what should have flowed there says nothing of what did
        due = {name: one.times(1 / together) for name, one in _sums(one.given or {} for one in ranks).items()}
        cut = any(part for one in ranks for _, part in one.seen)
        parts = [{at: it for one in ranks for at, it in one.seen.items()}] if cut else [one.seen for one in ranks]
        for those in parts:
            here = _sums({name: one} for (name, _), one in those.items())
            pairs = [(here[name], due[name]) for name in here if name in due and here[name].shape == due[name].shape]
            if any(one.norm for one, _ in pairs) and any(it.norm for _, it in pairs):
                found.append(_size(pairs, summed=len(ranks) > 1))
    return found


def are_divided(sizes: Sequence[float], times: float) -> bool:
    """Whether gradients of these ``sizes`` are divided by ``times``, rather than not: most, or any exactly.

    Nobody divides by such a number who does not mean it.
    """
    exactly = any(abs(one * times - 1.0) <= _WHOLE for one in sizes)
    divided = sum(_off(one * times) < _off(one) for one in sizes)
    return exactly or 2 * divided > len(sizes)


def divided_by(sizes: Sequence[float], numbers: Sequence[float]) -> float:
    """Which of the ``numbers`` gradients of these ``sizes`` are divided by: most, or any exactly, by the largest then.

    Of numbers that are as good, the first.
    """
    exact = [by for by in numbers if any(abs(one * by - 1.0) <= _WHOLE for one in sizes)]
    votes = [min(numbers, key=lambda by: _off(one * by)) for one in sizes]
    return max(exact) if exact else max(numbers, key=votes.count)


def enter_times(times: float, declared: float | None, ledger: Ledger) -> None:
    """Enter that losses were multiplied by so many ``times`` the ``declared`` scale, which is then in doubt."""
    seen = f"losses were multiplied by {times * (declared or 1.0):g}"
    if declared is None:
        ledger.remark("boundaries", f"{seen} and gradients divided by it: that was taken as meant")
    else:
        cure = f"declare loss_scale={times * declared:g}, if that is meant"
        ledger.doubt("boundaries", f"{seen}, and the contract says loss_scale={declared:g}: {cure}")


def _plain(factor: float) -> float:
    """``factor``, or the whole number that it is, or one part of which it is."""
    for plain in (round(factor), 1 / (round(1 / factor) or math.inf)):
        if plain and abs(factor - plain) <= _WHOLE * abs(factor):
            return float(plain)
    return factor


def _off(size: float) -> float:
    """How far it is from 1, either way."""
    return abs(math.log(size)) if size > 0 else math.inf


def _sketch(gradient: Tensor, own: OwnStage) -> Sketch:
    found = sketch(dense(gradient))
    return found if own.factor is None else found.times(own.factor)


def _sums(every: Iterable[Mapping[str, Sketch]]) -> dict[str, Sketch]:
    """The sums of all, by name."""
    found: dict[str, Sketch] = {}
    for one in every:
        for name, more in one.items():
            found[name] = found[name].plus(more) if name in found else more
    return found


def _size(pairs: Sequence[tuple[Sketch, Sketch]], *, summed: bool) -> float:
    """How large all that is seen is, in multiples of what is due: of what was ``summed``, by projections alone."""
    along = sum(a * b for one, it in pairs for a, b in zip(one.projections, it.projections, strict=True))
    seen, due = ([one.plus(one.times(0.0)) for one in those] if summed else those for those in zip(*pairs, strict=True))
    size = math.hypot(*(one.norm for one in seen)) / math.hypot(*(one.norm for one in due))
    return math.copysign(size, along or 1.0)
