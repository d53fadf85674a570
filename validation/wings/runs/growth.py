"""How far rounding alone drives two right runs apart, step by step: measured by a third one with another order of sums.

Growth of a rounding difference depends on its age, so a run that parts at step n is allowed the third run's distance at
the same age. The third run's distance at other times neither proves nor excuses a fault: in between, nothing is
decided.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from statistics import median
from typing import NamedTuple

from pipeproof.core.limits import BF16, FP32, Precision, coarsest
from pipeproof.core.mismatch import small
from pipeproof.core.observe.sketch import Sketch
from pipeproof.core.tolerance import Floor
from pipeproof.records.record import RecordError, numbers_in, other_microbatch
from pipeproof.wings.runs.file import STEPS, other_options
from pipeproof.wings.runs.run import WholeRun, WholeStep

_MOST = 1 / 64  # upper bound of a tolerated relative difference, for every growth
# What jumps where modules compute in a narrow type, or a narrower one than weights have: a last place that is cast
# otherwise in a step makes more than all steps before. Updates follow.
_COMPUTED = ("initial-weights", "loss", "gradient", "grad-norm")
_NO_ROUNDING = BF16.most  # in a single step no order of sums changes so much of anything that is not rounding itself


class Quantity(NamedTuple):
    """A quantity compared in each step: a law, and a parameter or microbatch."""

    law: str
    name: str | int = ""


class Apart(NamedTuple):
    """A distance: relative to the first value, and absolute."""

    relative: float = 0.0
    size: float = 0.0


def differences(one: WholeStep, other: WholeStep) -> dict[Quantity, Apart]:
    """Return the quantities that differ in a bit, with distances relative to ``one``."""
    found: dict[Quantity, Apart] = {}
    for law, own, theirs in (
        ("initial-weights", one.before, other.before),
        ("gradient", one.gradients, other.gradients),
    ):
        found |= {Quantity(law, name): _distance(own[name], theirs[name]) for name in _unlike(own, theirs)}
    for name in _unlike(one.weights, other.weights):
        if any(step.weights[name].digest != step.before[name].digest for step in (one, other)):
            found[Quantity("updated-parameters", name)] = _distance(movement(one, name), movement(other, name))
    for what, mine, its in number_pairs(one, other):
        if mine != its and (math.isfinite(mine) or math.isfinite(its)):
            gap = abs(its - mine)
            relative = gap / abs(mine) if mine and gap < math.inf else math.inf
            found[what] = Apart(relative, gap if gap < math.inf else math.inf)
    return found


def _unlike(one: Mapping[str, Sketch], other: Mapping[str, Sketch]) -> list[str]:
    return [name for name in one if name in other and one[name].digest != other[name].digest]


def _distance(one: Sketch, other: Sketch) -> Apart:
    """Return the distance; NaN or infinity on both sides gives none."""
    if not (math.isfinite(one.norm) or math.isfinite(other.norm)):
        return Apart()
    return Apart(other.distance(one), other.gap(one))


def movement(step: WholeStep, name: str) -> Sketch:
    """How far a weight moved in a step."""
    return step.weights[name].minus(step.before[name])


def number_pairs(one: WholeStep, other: WholeStep) -> list[tuple[Quantity, float, float]]:
    """Pair the losses, their total, and the norm of two steps, if both have them.

    Losses are matched by microbatch numbers in ``one``, because ranks may run in another order. The total is what
    ``other``'s losses would give there, so a wrong loss does not blame the sum.
    """
    losses, total = other.losses, one.loss
    if one.microbatches is not None and other.microbatches is not None:
        numbers = numbers_in(one.microbatches, other.microbatches)
        losses = losses if numbers is None else {numbers[k]: loss for k, loss in losses.items()}
    pairs = [(Quantity("loss", k), loss, losses[k]) for k, loss in sorted(one.losses.items()) if k in losses]
    own, theirs = [loss for _, loss, _ in pairs], [loss for *_, loss in pairs]
    if total is not None and len(own) == len(one.losses) and all(map(math.isfinite, own + theirs)) and math.fsum(own):
        total *= math.fsum(theirs) / math.fsum(own)
    more = [(Quantity("loss"), total, other.loss), (Quantity("grad-norm"), one.norm, other.norm)]
    return pairs + [(what, mine, its) for what, mine, its in more if mine is not None and its is not None]


def _typical(found: Mapping[Quantity, Apart], law: str) -> float:
    """Return the median distance under ``law``, over parameters."""
    known = [apart.relative for what, apart in found.items() if what.law == law and apart.relative < math.inf]
    return median(known or [0.0])


@dataclass
class _Largest:
    """The largest differences up to some step; ``typical`` are the medians over parameters, the largest by law.

    ``rounding``: parameters with pure rounding as gradient, for example a bias before a normalisation: a small part of
    all, unless hardly anything else is there. ``moved``: movement of the good run's weights in one step.
    """

    count: int = 0  # of steps
    each: dict[Quantity, Apart] = field(default_factory=dict)
    typical: dict[str, float] = field(default_factory=dict)
    rounding: set[str] = field(default_factory=set)
    moved: dict[str, float] = field(default_factory=dict)

    def add(self, step: WholeStep, found: Mapping[Quantity, Apart]) -> None:
        """Advance to this step."""
        self.count += 1
        much = max(_NO_ROUNDING, FP32.factor * _typical(found, "gradient"))
        for name, gradient in step.gradients.items():
            apart = found.get(Quantity("gradient", name), Apart())
            if gradient.norm <= _MOST * step.size and apart.relative > much:
                self.rounding.add(name)
        for name in step.weights:
            self.moved[name] = max(self.moved.get(name, 0.0), movement(step, name).norm)
        for what, apart in found.items():
            if apart.size < math.inf:  # after an overflow nothing can be measured
                self.each[what] = Apart(*map(max, apart, self.each.get(what, Apart())))
        for law in {what.law for what in found}:
            self.typical[law] = max(self.typical.get(law, 0.0), _typical(found, law))

    def of(self, what: Quantity) -> float:
        """Return the growth of rounding in this quantity, or in similar ones: single numbers may agree by chance."""
        law = what.law if what.law in self.typical and isinstance(what.name, str) and what.name else "gradient"
        return max(self.each.get(what, Apart()).relative, self.typical.get(law, 0.0))


class Growth:
    """Rounding allowed in ``good``, measured on ``third``.

    Raises ``RecordError`` if its steps differ otherwise than by rounding, or equal ``good`` in all bits.
    """

    def __init__(self, good: WholeRun, third: WholeRun) -> None:
        self._good, self._third = good, third
        there = set(third.numbers)
        self._numbers = [number for number in good.numbers if number in there]
        self.last = max(self._numbers, default=-1)  # that is measured
        self._differences = lru_cache(STEPS)(self._compare)
        self._aged, self._ever = _Largest(), _Largest()

    @cached_property
    def parted(self) -> int:
        """First step at which the third run leaves the good one."""
        found = next((number for number in self._numbers if self._differences(number)), None)
        if found is None:
            raise RecordError(
                f"{self._third} measures no rounding: it is {self._good} bit for bit; give a run with another order of "
                "sums: its microbatches in another order, another number of threads, or another layout"
            )
        if (typical := _typical(self._differences(found), "gradient")) > _NO_ROUNDING:
            raise RecordError(
                f"{self._third} measures more than rounding: in step {found}, the first in which it parts from "
                f"{self._good}, gradients differ by {small(typical)}; give a run of the right code "
                "in which sums alone have another order"
            )
        return found

    def floor(self, what: Quantity, number: int, precision: Precision, *, parted: int) -> Floor:
        """Return the floor at step ``number``, for a run that parted at step ``parted``; ``precision``: of its type."""
        age = self.parted + number - parted
        self._reach(self._aged, age)
        self._reach(self._ever, max(age, number))
        aged = max(precision.unit, self._aged.of(what))
        nudged = max(FP32.factor * aged, self._ever.of(what))  # a coarse type's own factor leaves no room for luck
        most = max(precision.most, _MOST)
        step = self._good.step(number)
        if what.law in _COMPUTED and step.computed.unit > min(precision.unit, FP32.unit):
            # What the third run shows of so coarse a type is multiplied by that one's own factor: by another, all would
            # be unknown, gradients of zeros too. Another rounding in it has an effect on all gradients together.
            own, jump = coarsest([precision, step.computed]).factor, step.computed.most
            one = step.gradients.get(str(what.name)) if what.law == "gradient" else None
            if one is not None and one.norm:
                jump = max(jump, step.computed.unit * step.size / one.norm)
            nudged = max(own * nudged, jump) / precision.factor
        size, driven = self._noise(what, step, precision), 0.0
        if not size and what.law == "updated-parameters":
            # Optimizers move elements with pure rounding as gradient like others, for example the bias of keys, which
            # attention ignores, in one parameter with queries and values: that is unusual among parameters.
            apart, usual = self._aged.each.get(what, Apart()), most / precision.factor
            rare = self._aged.typical.get(what.law, 0.0) <= usual < apart.relative
            driven = apart.size if rare and apart.size < math.inf else 0.0
        return Floor(aged, 0.0, 0.0, replace(precision, most=most), nudged, size or driven, driven=driven > 0)

    def _noise(self, what: Quantity, step: WholeStep, precision: Precision) -> float:
        """Return the rounding of a parameter with pure rounding as gradient; 0 for others.

        The third run shows this, or a gradient below the last place of the whole. Optimizers may amplify it without
        bound.
        """
        name = str(what.name)
        gradient = step.gradients.get(name) if what.law in ("gradient", "updated-parameters") else None
        if gradient is None:
            return 0.0
        least = FP32.unit * step.size
        by_itself = gradient.norm <= least and (what.law == "gradient" or gradient.norm > 0)
        if name not in self._ever.rounding and not by_itself:
            return 0.0
        most = self._ever.each.get(what, Apart()).size
        if what.law == "gradient":
            return max(least, most)
        return max(self._ever.moved.get(name, 0.0), 2 * precision.unit * step.before[name].norm, most)

    def summary(self, until: int) -> str:
        """Describe the growth of rounding in gradients, from parting to this step."""
        last = max(number for number in self._numbers if number <= until)
        first, then = (small(_typical(self._differences(number), "gradient")) for number in (self.parted, last))
        return f"rounding makes {first} of a gradient in step {self.parted}, and {then} in step {last}"

    def _reach(self, largest: _Largest, until: int) -> None:
        while largest.count < len(self._numbers) and self._numbers[largest.count] <= until:
            number = self._numbers[largest.count]
            largest.add(self._good.step(number), self._differences(number))

    def _compare(self, number: int) -> Mapping[Quantity, Apart]:
        """How far apart the two are in a step."""
        one, other, why = self._good.step(number), self._third.step(number), ""
        own, theirs = one.microbatches, other.microbatches
        unlike = _unlike(one.before, other.before) if number == self._numbers[0] else []
        if own is not None and theirs is not None and numbers_in(own, theirs) is None:
            why = f"has other microbatches, {other_microbatch(own, theirs)}"
        elif options := other_options(one.options, other.options):
            why = f"has another optimizer: {options}"
        elif unlike:
            why = f"begins with other weights, {unlike[0]} first"
        elif one.clipped != other.clipped:
            why = "has gradients before clipping where the other has them after it, or the other way round"
        if why:
            what = f"in step {number} it {why}; expected the steps of {self._good}"
            raise RecordError(f"{self._third} measures more than rounding: {what}")
        return differences(one, other)
