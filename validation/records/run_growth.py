"""How far rounding alone drives two right runs apart, step by step: measured by a third one with another order of sums.

What a difference of rounding grows to depends on how long ago it arose, so what is allowed to a run that parts at step
n is what the third run showed as many steps after it parted. What it showed at other times proves no fault, and excuses
none: between the two nothing is decided.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from statistics import median
from typing import NamedTuple

from pipeproof.core.limits import BF16, FP32, Precision, coarsest
from pipeproof.core.mismatch import small
from pipeproof.core.tolerance import Floor
from pipeproof.observers.sketch import Sketch
from pipeproof.records.kept_run import KeptRun, KeptStep
from pipeproof.records.options import other_options
from pipeproof.records.record import RecordError, numbers_in, other_microbatch
from pipeproof.records.run_file import STEPS

_MOST = 1 / 64  # of what is compared: no growth, however large, lets more than this pass
# What jumps where modules compute in a narrow type, or a narrower one than weights have: a last place that is cast
# otherwise in a step makes more than all steps before. Updates follow.
_COMPUTED = ("initial-weights", "loss", "gradient", "grad-norm")
_NO_ROUNDING = BF16.most  # in a single step no order of sums changes so much of anything that is not rounding itself


class Quantity(NamedTuple):
    """What is compared in each step: a law, and a parameter or a microbatch."""

    law: str
    name: str | int = ""


class Apart(NamedTuple):
    """How far apart two are: relative to the first of them, and as it is."""

    relative: float
    size: float


def differences(one: KeptStep, other: KeptStep) -> dict[Quantity, Apart]:
    """What of two steps is not the same bit for bit, and how far apart it is; ``one`` is what it is relative to."""
    found = {
        Quantity(law, name): _apart(mine[name], theirs[name])
        for law, mine, theirs in (
            ("initial-weights", one.before, other.before),
            ("gradient", _tensors(one.gradients), _tensors(other.gradients)),
        )
        for name in _unlike(mine, theirs)
    }
    for name in _unlike(one.weights, other.weights):
        if any(step.weights[name].digest != step.before[name].digest for step in (one, other)):
            found[Quantity("updated-parameters", name)] = _apart(movement(one, name), movement(other, name))
    return found | {what: apart for what, apart in _numbers(one, other) if apart.size}


def _apart(one: Sketch, other: Sketch) -> Apart:
    """How far the other is from the one; what is not finite in both tells nothing."""
    if not (math.isfinite(one.norm) or math.isfinite(other.norm)):
        return Apart(0.0, 0.0)
    return Apart(other.distance(one), other.gap(one))


def movement(step: KeptStep, name: str) -> Sketch:
    """How far a weight moved in a step."""
    return step.weights[name].minus(step.before[name])


def matched(one: KeptStep, other: KeptStep) -> Mapping[int, float]:
    """The losses of ``other`` by the numbers that microbatches have in ``one``: ranks may run them in another order."""
    numbers = None
    if one.microbatches is not None and other.microbatches is not None:
        numbers = numbers_in(one.microbatches, other.microbatches)
    return other.losses if numbers is None else {numbers[k]: loss for k, loss in other.losses.items()}


def _numbers(one: KeptStep, other: KeptStep) -> Iterable[tuple[Quantity, Apart]]:
    theirs = matched(one, other)
    pairs: dict[Quantity, tuple[float | None, float | None]] = {
        Quantity("loss", number): (loss, theirs.get(number)) for number, loss in one.losses.items()
    }
    pairs |= {Quantity("loss"): (one.loss, other.loss), Quantity("grad-norm"): (one.norm, other.norm)}
    for what, (due, seen) in pairs.items():
        if due is not None and seen is not None:
            yield what, _numbers_apart(due, seen)


def _numbers_apart(due: float, seen: float) -> Apart:
    if due == seen or not (math.isfinite(due) or math.isfinite(seen)):
        return Apart(0.0, 0.0)
    gap = abs(seen - due)
    return Apart(gap / abs(due) if due else math.inf, gap) if gap < math.inf else Apart(math.inf, math.inf)


def _tensors(found: Mapping[str, Sketch | None]) -> dict[str, Sketch]:
    return {name: one for name, one in found.items() if one is not None}


def _unlike(one: Mapping[str, Sketch], other: Mapping[str, Sketch]) -> list[str]:
    return [name for name in one if name in other and one[name].digest != other[name].digest]


def _typical(found: Mapping[Quantity, Apart], law: str) -> float:
    """The median of what differs under ``law``, over parameters."""
    return median(
        [apart.relative for what, apart in found.items() if what.law == law and apart.relative < math.inf] or [0.0]
    )


@dataclass
class _Largest:
    """The largest differences up to some step; ``typical`` are the medians over parameters, the largest by law.

    ``rounding``: parameters whose gradients are rounding alone, such as a bias before a normalisation: they are a small
    part of all, and others where hardly anything else is. ``moved``: how far the good run's weights went in one step.
    """

    count: int = 0  # of steps
    each: dict[Quantity, Apart] = field(default_factory=dict)
    typical: dict[str, float] = field(default_factory=dict)
    rounding: set[str] = field(default_factory=set)
    moved: dict[str, float] = field(default_factory=dict)

    def add(self, step: KeptStep, found: Mapping[Quantity, Apart]) -> None:
        """Go on to this step."""
        self.count += 1
        much = max(_NO_ROUNDING, FP32.factor * _typical(found, "gradient"))
        far = [str(what.name) for what, one in found.items() if what.law == "gradient" and one.relative > much]
        small_ones = {name for name, one in _tensors(step.gradients).items() if one.norm <= _MOST * step.size}
        self.rounding |= small_ones.intersection(far)
        for name in step.weights:
            self.moved[name] = max(self.moved.get(name, 0.0), movement(step, name).norm)
        for what, apart in found.items():
            if apart.size == math.inf:  # where one of them overflows, nothing is measured
                continue
            before = self.each.get(what, Apart(0.0, 0.0))
            self.each[what] = Apart(*map(max, apart, before))
        for law in {what.law for what in found}:
            self.typical[law] = max(self.typical.get(law, 0.0), _typical(found, law))

    def of(self, what: Quantity) -> float:
        """How far rounding drove this, or what is like it: single numbers may agree by chance."""
        law = what.law if what.law in self.typical and isinstance(what.name, str) and what.name else "gradient"
        return max(self.each.get(what, Apart(0.0, 0.0)).relative, self.typical.get(law, 0.0))


def _jump(what: Quantity, step: KeptStep) -> float:
    """How far another rounding in the type that modules compute in may move it, relative to what it is."""
    one = step.gradients.get(str(what.name)) if what.law == "gradient" else None
    most = step.computed.most
    return most if one is None or not one.norm else max(most, step.computed.unit * step.size / one.norm)


class Growth:
    """What rounding may do to ``good``, by what it did to ``third``.

    Raises ``RecordError`` where that is of other steps, and so shows more than rounding, or is ``good`` bit for bit.
    """

    def __init__(self, good: KeptRun, third: KeptRun) -> None:
        self._good, self._third = good, third
        there = set(third.numbers)
        self._numbers = [number for number in good.numbers if number in there]
        self._differences = lru_cache(STEPS)(self._compared)
        self._aged, self._ever = _Largest(), _Largest()

    @cached_property
    def parted(self) -> int:
        """The first step at which the third run parts from the good one."""
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

    @property
    def last(self) -> int:
        """The last step that is measured; -1 where none is."""
        return self._numbers[-1] if self._numbers else -1

    def floor(self, what: Quantity, number: int, precision: Precision, *, parted: int) -> Floor:
        """Of ``what`` in step ``number``, for a run that parted at step ``parted``; ``precision`` as of its type."""
        age = self.parted + number - parted
        self._reach(self._aged, age)
        self._reach(self._ever, max(age, number))
        aged = max(precision.unit, self._aged.of(what))
        nudged = max(FP32.factor * aged, self._ever.of(what))  # a coarse type's own factor leaves no room for luck
        most = max(precision.most, _MOST)
        step = self._good.step(number)
        if what.law in _COMPUTED and step.computed.unit > min(precision.unit, FP32.unit):
            # What the third run shows of so coarse a type is multiplied by that one's own factor: by another, all would
            # be unknown, gradients of zeros too.
            own = coarsest([precision, step.computed]).factor
            nudged = max(own * nudged, _jump(what, step)) / precision.factor
        size = self._size(what, step, precision)
        driven = 0.0 if size else self._driven(what, most / precision.factor)
        return Floor(aged, 0.0, 0.0, replace(precision, most=most), nudged, size or driven, driven=driven > 0)

    def _driven(self, what: Quantity, most: float) -> float:
        """What rounding makes of an update, where that is more than ``most`` of it and no such part of others.

        Optimizers make as much of elements whose gradient is rounding alone as of others, e.g. of the bias of keys, of
        which no attention takes notice, in one parameter with those of queries and values.
        """
        seen = self._aged.each.get(what)
        if what.law != "updated-parameters" or seen is None or self._aged.typical.get(what.law, 0.0) > most:
            return 0.0
        return seen.size if most < seen.relative and seen.size < math.inf else 0.0

    def _size(self, what: Quantity, step: KeptStep, precision: Precision) -> float:
        """What rounding makes of a parameter whose gradient is nothing else; 0 of any other.

        That is seen by the third run, or as the gradient is a smaller part of all than the last place of it. What
        optimizers make of such a gradient may lead anywhere.
        """
        gradient = step.gradients.get(str(what.name)) if what.law in ("gradient", "updated-parameters") else None
        if gradient is None:
            return 0.0
        least = FP32.unit * step.size
        by_itself = gradient.norm <= least and (what.law == "gradient" or gradient.norm > 0)
        if what.name not in self._ever.rounding and not by_itself:
            return 0.0
        seen = self._ever.each.get(what, Apart(0.0, 0.0)).size
        if what.law == "gradient":
            return max(least, seen)
        name = str(what.name)
        return max(self._ever.moved.get(name, 0.0), 2 * precision.unit * step.before[name].norm, seen)

    def told(self, until: int) -> str:
        """How far rounding drives gradients apart, from where they part to this step, in words."""
        last = max(number for number in self._numbers if number <= until)
        first, then = (small(_typical(self._differences(number), "gradient")) for number in (self.parted, last))
        return f"rounding makes {first} of a gradient in step {self.parted}, and {then} in step {last}"

    def _reach(self, largest: _Largest, until: int) -> None:
        while largest.count < len(self._numbers) and self._numbers[largest.count] <= until:
            number = self._numbers[largest.count]
            largest.add(self._good.step(number), self._differences(number))

    def _compared(self, number: int) -> Mapping[Quantity, Apart]:
        """How far apart the two are in a step."""
        one, other = self._good.step(number), self._third.step(number)
        self._check_same(one, other)
        return differences(one, other)

    def _check_same(self, one: KeptStep, other: KeptStep) -> None:
        why, due, seen = "", one.microbatches, other.microbatches
        if due is not None and seen is not None and numbers_in(due, seen) is None:
            why = f"has other microbatches, {other_microbatch(due, seen)}"
        elif told := other_options(one.options, other.options):
            why = f"has another optimizer: {told}"
        elif one.number == self._numbers[0] and _unlike(one.before, other.before):
            why = f"begins with other weights, {_unlike(one.before, other.before)[0]} first"
        elif one.clipped != other.clipped:
            why = "has gradients before clipping where the other has them after it, or the other way round"
        if why:
            raise RecordError(
                f"{self._third} measures more than rounding: in step {one.number} it {why}; expected the steps of "
                f"{self._good}"
            )
