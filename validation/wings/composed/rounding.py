"""Rounding of a stage's results, measured on one call and used for all."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

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


@dataclass
class Envelope:
    """The ``runs`` of a call: two, and one in fp64 if these leave a difference unexplained.

    ``in_fp64``: runs it in fp64, or gives None. ``off``: gives its contribution with weights one rounding off.
    ``narrowest``: the computing type, if narrower than the weights. ``inside``: the type of sums over ranks.
    """

    runs: list[Made]
    in_fp64: Callable[[], Made | None]
    off: Callable[[], Contribution | None]
    narrowest: torch.dtype | None = None
    inside: torch.dtype | None = None

    def limit(self, at: Point, made: Tensor) -> float:
        """Return how far rounding may put ``made`` of another call; infinite for non-finite values."""
        if not all_finite(made):
            return math.inf
        precision = coarsest([precision_of(one) for one in (made.dtype, self.inside) if one is not None])
        own, *others = (run.tensors.get(at) for run in self.runs)
        apart = max(0.0 if own is None else _error(own, one) for one in others)
        return min(precision.most, max(precision.least, precision.factor * apart))

    def widen(self) -> None:
        """Include fp64 in the limits from now on."""
        self.runs[2:] = [one for one in [self._wide] if one is not None]

    def is_strange(self, at: Point) -> bool:
        """True if two runs differ here, as random numbers do; a third run may differ as much."""
        made, again = (run.tensors.get(at) for run in self.runs[:2])
        if made is None or again is None or made.shape != again.shape:
            return True
        return error(again, made) > HALF * self.limit(at, made)

    @property
    def loss_apart(self) -> float:
        """Relative distance between the losses of its runs."""
        own, *others = (run.loss.value for run in self.runs)
        return max(0.0 if own is None else _error(own, one) for one in others)

    def gradient(self, site: Site, total: Tensor, *, calls: int, size: float) -> Floor | None:
        """Return the floor for a ``total`` over ``calls`` with norm ``size``; None if the call adds nothing."""
        twice = self.runs[1].contribution
        if twice is None or (part := twice.gradients.get(site)) is None:
            return None
        wide = None if self._wide is None else self._wide.contribution
        apart = part if wide is None or (double := wide.gradients.get(site)) is None else double
        found = floor_of(part.to(total.dtype), (), apart, [part], again=lambda: self._nudged(site))
        if self.narrowest is not None and (narrow := precision_of(self.narrowest)).unit > found.precision.unit:
            found = replace(found, precision=replace(narrow, least=found.precision.least))
        if apart is part and (nudged := self._nudged(site)) is not None:
            found = replace(found, nudged=error(part, nudged))
        return found.of_sum(in_fp64(part).norm().item(), parts=calls, whole=size)

    @cached_property
    def _wide(self) -> Made | None:
        """Run the call in fp64; None if the result differs, for example by random numbers."""
        found = self.in_fp64()
        if found is None:
            return None
        every = [(at, one) for at, one in self.runs[0].tensors.items() if at[0] == MADE]
        types = [one for one in (self.narrowest, self.inside) if one is not None]
        most = {at: coarsest([*map(precision_of, (one.dtype, *types))]).most for at, one in every}
        return found if all(_error(one, found.tensors.get(at)) <= most[at] for at, one in every) else None

    def _nudged(self, site: Site) -> Tensor | None:
        off = self.off()
        return None if off is None else off.gradients.get(site)


def _error(made: Tensor, other: Tensor | None) -> float:
    return 0.0 if other is None or other.shape != made.shape else error(made, other)


@dataclass
class Envelopes:
    """The ``measured`` calls of a stage: the first that differs, and one that differs more.

    ``measure``: measures a call, given its first run.
    """

    measure: Callable[[int, Made | None], Envelope]
    measured: dict[int, Envelope] = field(default_factory=dict)

    def at(self, k: int, made: Made | None = None) -> Envelope:
        """Return the envelope of call ``k``."""
        if k not in self.measured:
            self.measured[k] = self.measure(k, made)
        return self.measured[k]

    @property
    def is_full(self) -> bool:
        """True after two measurements, the maximum."""
        return len(self.measured) > 1

    def of_sum(self, sizes: Mapping[int, float]) -> Envelope:
        """Return the envelope of the largest contributor by ``sizes``, or half as large: small ones tell little."""
        measured = max(self.measured, key=lambda k: sizes.get(k, 0.0), default=None)
        largest = max(sizes, key=lambda k: sizes[k])
        if measured is not None and (self.is_full or 2 * sizes.get(measured, 0.0) >= sizes[largest]):
            return self.measured[measured]
        return self.at(largest)

    def of_call(
        self, made: Made, pairs: Mapping[Point, tuple[Sketch | None, Sketch]]
    ) -> tuple[dict[Point, float], frozenset[Point], float]:
        """Return how far rounding may put a call, ``made`` by its run, the places that differ in each run, and losses.

        ``pairs``: observed and expected, where they differ.
        """
        if not self.measured:
            self.at(made.k, made)
        if self._is_over(made, pairs):  # two runs differ less
            for one in self.measured.values():
                one.widen()
        if not self.is_full and self._is_over(made, pairs):
            self.at(made.k, made).widen()
        every = self.measured.values()
        strange = {at for at in pairs for one in every if one.is_strange(at)}
        return self._limits(made, pairs), frozenset(strange), max(one.loss_apart for one in every)

    def _limits(self, made: Made, where: Iterable[Point]) -> dict[Point, float]:
        return {at: max(one.limit(at, made.tensors[at]) for one in self.measured.values()) for at in where}

    def _is_over(self, made: Made, pairs: Mapping[Point, tuple[Sketch | None, Sketch]]) -> bool:
        limits = self._limits(made, pairs)
        return any(one is None or one.distance(expected) > limits[at] for at, (one, expected) in pairs.items())
