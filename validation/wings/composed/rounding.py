"""Rounding of a stage's results, measured on one call and used for all."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from pipeproof.core.limits import HALF, coarsest, precision_of
from pipeproof.core.observe.elements import all_finite, in_fp64
from pipeproof.core.observe.recording import MADE
from pipeproof.core.observe.sketch import Sketch
from pipeproof.core.tolerance import Floor, error, floor_of
from pipeproof.reference.accumulation import length_of
from pipeproof.reference.step import Contribution, Site
from pipeproof.wings.composed.link import Point
from pipeproof.wings.composed.loss import LossExpected

_PIECE = 1 << 18  # elements


def length_in_pieces(gradient: Tensor) -> float:
    """Compute the 2-norm in fp64; a large gradient in pieces, because fp64 doubles it."""
    pieces = torch.split(gradient.detach().reshape(-1), _PIECE)
    return length_of(gradient.detach()) if len(pieces) < 2 else math.hypot(*map(length_of, pieces))


@dataclass
class Made:
    """One run of call ``k``: its tensors; gradients from other outputs, by number; its contribution, and its loss's.

    ``disturb``: its loss draws different random numbers. ``output``: until its graph goes. ``drawn``: states of
    generators when its backward begins.
    """

    k: int
    disturb: bool = False
    output: object = None
    tensors: dict[Point, Tensor] = field(default_factory=dict)
    more: dict[int, Tensor] = field(default_factory=dict)
    contribution: Contribution | None = None
    loss: LossExpected = field(default_factory=LossExpected)
    drawn: Mapping[torch.device, Tensor] = field(default_factory=dict)


class Envelopes:
    """Rounding of a stage's results, measured on the first call that differs, and on one that differs more.

    ``again``: runs a call once more. ``in_fp64``: likewise, or gives None. ``off``: gives a call's contribution with
    weights one rounding off, or None. ``narrowest``: the computing type, if narrower than the weights. ``inside``: the
    type of sums over ranks.
    """

    def __init__(
        self,
        again: Callable[[int], Made],
        in_fp64: Callable[[int], Made | None],
        off: Callable[[int], Contribution | None],
        *,
        narrowest: torch.dtype | None,
        inside: torch.dtype | None,
    ) -> None:
        self._again, self._in_fp64, self._off = again, cache(in_fp64), cache(off)
        self._narrowest, self._inside = narrowest, inside
        self._runs: dict[int, list[Made]] = {}  # of measured calls: two, and one in fp64 if these explain too little

    @property
    def is_full(self) -> bool:
        """True after two measurements, the maximum."""
        return len(self._runs) > 1

    def of_call(
        self, made: Made, pairs: Mapping[Point, tuple[Sketch | None, Sketch]]
    ) -> tuple[dict[Point, float], frozenset[Point], float]:
        """Return how far rounding may put a call, ``made`` by its run, the places that differ in each run, and losses.

        ``pairs``: observed and expected, where they differ.
        """
        if not self._runs:
            self._measured(made.k, made)
        if self._is_over(made, pairs):  # two runs differ less
            self._widen(self._runs)
        if not self.is_full and self._is_over(made, pairs):
            self._measured(made.k, made)
            self._widen([made.k])
        strange = frozenset(at for at in pairs if any(self._is_strange(k, at) for k in self._runs))
        losses = ([run.loss.value for run in runs] for runs in self._runs.values())
        apart = [0.0 if own is None else _error(own, one) for own, *others in losses for one in others]
        return self._limits(made, pairs), strange, max(0.0, *apart)

    def of_sum(self, site: Site, total: Tensor, sizes: Mapping[int, float], *, size: float) -> Floor | None:
        """Return the floor for a ``total`` with norm ``size``; None if the measured call adds nothing to it.

        Of contributors, by their ``sizes``, the largest is measured, or one half as large: small ones tell little.
        """
        largest = max(sizes, key=lambda k: sizes[k])
        k = max(self._runs, key=lambda k: sizes.get(k, 0.0), default=largest)
        k = k if self.is_full or 2 * sizes.get(k, 0.0) >= sizes[largest] else largest
        twice = self._measured(k)[1].contribution
        if twice is None or (part := twice.gradients.get(site)) is None:
            return None

        def nudged() -> Tensor | None:
            off = self._off(k)
            return None if off is None else off.gradients.get(site)

        wide = None if (there := self._wide(k)) is None else there.contribution
        apart = part if wide is None or (double := wide.gradients.get(site)) is None else double
        found = floor_of(part.to(total.dtype), (), apart, [part], again=nudged)
        if self._narrowest is not None and (narrow := precision_of(self._narrowest)).unit > found.precision.unit:
            found = replace(found, precision=replace(narrow, least=found.precision.least))
        if apart is part and (moved := nudged()) is not None:
            found = replace(found, nudged=error(part, moved))
        return found.of_sum(in_fp64(part).norm().item(), parts=len(sizes), whole=size)

    def _measured(self, k: int, made: Made | None = None) -> list[Made]:
        """Return a call's runs; ``made``: its first, if it is measured now."""
        if k not in self._runs:
            twice = self._again(k)
            self._runs[k] = [made or twice, twice]
        return self._runs[k]

    def _widen(self, calls: Iterable[int]) -> None:
        """Include fp64 in the limits of ``calls`` from now on."""
        for k in calls:
            self._runs[k][2:] = [one for one in [self._wide(k)] if one is not None]

    def _wide(self, k: int) -> Made | None:
        """Run the call in fp64; None if the result differs, for example by random numbers."""
        if (found := self._in_fp64(k)) is None:
            return None
        types = [one for one in (self._narrowest, self._inside) if one is not None]
        made = [(at, one) for at, one in self._runs[k][0].tensors.items() if at[0] == MADE]
        most = [coarsest([*map(precision_of, (one.dtype, *types))]).most for _, one in made]
        gaps = [_error(one, found.tensors.get(at)) for at, one in made]
        return found if all(gap <= one for gap, one in zip(gaps, most, strict=True)) else None

    def _limits(self, made: Made, where: Iterable[Point]) -> dict[Point, float]:
        return {at: max(self._limit(k, at, made.tensors[at]) for k in self._runs) for at in where}

    def _limit(self, k: int, at: Point, made: Tensor) -> float:
        """Return how far rounding may put ``made`` of another call; infinite for non-finite values."""
        if not all_finite(made):
            return math.inf
        precision = coarsest([precision_of(one) for one in (made.dtype, self._inside) if one is not None])
        own, *others = (run.tensors.get(at) for run in self._runs[k])
        apart = max(0.0 if own is None else _error(own, one) for one in others)
        return min(precision.most, max(precision.least, precision.factor * apart))

    def _is_over(self, made: Made, pairs: Mapping[Point, tuple[Sketch | None, Sketch]]) -> bool:
        limits = self._limits(made, pairs)
        return any(one is None or one.distance(expected) > limits[at] for at, (one, expected) in pairs.items())

    def _is_strange(self, k: int, at: Point) -> bool:
        """True if two runs differ here, as random numbers do; a third run may differ as much."""
        made, again = (run.tensors.get(at) for run in self._runs[k][:2])
        if made is None or again is None or made.shape != again.shape:
            return True
        return error(again, made) > HALF * self._limit(k, at, made)


def _error(made: Tensor, other: Tensor | None) -> float:
    return 0.0 if other is None or other.shape != made.shape else error(made, other)
