"""Which microbatch each call of a watched stage was about, and whether what passed its boundary is the reference's."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.action import Action, Kind
from validation.diagnosis.address import What
from validation.observed import Crossing
from validation.recording import GIVEN, HANDED_ON, KEPT, MADE, RECEIVED
from validation.whitebox.places import Both, Places
from validation.whitebox.sketch import Sketch
from validation.whitebox.watching import Call

_FLOWING = {GIVEN: (HANDED_ON,), MADE: (RECEIVED,)}  # the gradient of the same tensor
_ROUNDED = 2.0**-7  # more than rounding to bfloat16 changes


@dataclass(frozen=True)
class Passed:
    """A stage's actions in the order in which they ran, its module's calls, and what crossed its boundary.

    ``begins`` and ``ends`` are the places in the reference where its inputs and its outputs pass, by their numbers.
    """

    actions: tuple[Action, ...]
    called: tuple[tuple[Action, bool], ...]
    crossings: tuple[Crossing, ...]
    begins: Mapping[int, str] = field(default_factory=dict)
    ends: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Point:
    """One tensor of every call, and where in the reference it passes."""

    kind: Kind
    where: str
    what: str
    number: int
    seen: tuple[Sketch | None, ...]
    places: Places
    place: str
    judged: bool

    def owners(self, call: int) -> set[int]:
        """The microbatches whose tensor the one of this call is."""
        seen = self.seen[call]
        known = self.places.by_place[self.place]
        return set() if seen is None else {number for number, one in known.items() if seen.is_like(one)}


def passed(
    stage: int, calls: Sequence[Call], microbatches: int, places: Both, *, given: Mapping[int, str] | None = None
) -> Passed:
    """What the calls of ``stage`` were; ``places`` are those of tensors and of gradients.

    ``given``: the places where the stage before ends, by the number of its outputs. They stand for the places of inputs
    that are like nothing in the reference.
    """
    calls = _without_trial(calls, microbatches, places)
    points = list(_points(calls, places, given or {}))
    order = _microbatches(points, len(calls), microbatches)
    backs = sorted((end, order[k]) for k, call in enumerate(calls) for end in call.backwards)
    forwards = [Action(stage, Kind.FORWARD, microbatch) for microbatch in order]
    backwards = [Action(stage, Kind.BACKWARD, microbatch) for _, microbatch in backs]
    called = tuple((action, call.training) for action, call in zip(forwards, calls, strict=True))
    crossings = tuple(
        crossing
        for point in points
        for k, number in enumerate(order)
        for crossing in _crossing(stage, point, k, number)
    )
    begins, ends = ({p.number: p.place for p in points if p.where == where} for where in (GIVEN, MADE))
    return Passed((*forwards, *backwards), called, crossings, begins, ends)


def _without_trial(calls: Sequence[Call], microbatches: int, places: Both) -> Sequence[Call]:
    """``calls`` but for a first too many, by which a runtime learns shapes: its microbatch comes again, or none.

    Were it more than a trial, the gradients would show it.
    """
    if len(calls) != microbatches + 1:
        return calls
    points = list(_points(calls, places, {}))
    first, *others = (_owner(points, k) for k in range(len(calls)))
    return calls[1:] if first is None or first in others else calls


def _points(calls: Sequence[Call], places: Both, given: Mapping[int, str]) -> Iterator[_Point]:
    """Every tensor at the boundary that has a place in the reference; others are the runtime's own affair.

    Some may do without, for a diagnosis alone: an input where the stage before ends, a gradient where its tensor is.
    """
    forward, backward = places
    supposed = {(GIVEN, number): place for number, place in given.items()}
    for kind, where, what, part, known in (
        (Kind.FORWARD, GIVEN, "input", "inputs", forward),
        (Kind.FORWARD, MADE, "output", "outputs", forward),
        (Kind.BACKWARD, KEPT, "input when the backward begins", "kept", forward),
        (Kind.BACKWARD, RECEIVED, "output gradient", "output_gradients", backward),
        (Kind.BACKWARD, HANDED_ON, "input gradient", "input_gradients", backward),
    ):
        rows = [getattr(call, part) for call in calls]
        columns = [row if isinstance(row, dict) else dict(enumerate(row)) for row in rows]
        for number in sorted(set().union(*columns)):
            seen = tuple(column.get(number) for column in columns)
            own = known.usual(seen)
            place = own or supposed.get((where, number))
            if place in known.by_place:
                supposed |= {(flowing, number): place for flowing in _FLOWING.get(where, ())}
                name = f"{what} {number}" if number else what
                yield _Point(kind, where, name, number, seen, known, place, own is not None)


def _microbatches(points: Sequence[_Point], calls: int, microbatches: int) -> list[int]:
    """The microbatch of each call: by what came in, else by what went out, else one that is left, in order."""
    found = [_owner(points, k) for k in range(calls)]
    left = iter([number for number in range(microbatches) if number not in found] + [microbatches] * calls)
    return [next(left) if number is None else number for number in found]


def _owner(points: Sequence[_Point], call: int) -> int | None:
    for what in ("input", "output"):
        candidates = [point.owners(call) for point in points if point.what.split(" ")[0] == what]
        candidates = [owners for owners in candidates if owners]
        common = set.intersection(*candidates) if candidates else set()
        if len(common) == 1:
            return common.pop()
        if len(common) > 1:
            return call if call in common else None  # equal microbatches: nobody can tell them apart
    return None


def _crossing(stage: int, point: _Point, call: int, microbatch: int) -> Iterator[Crossing]:
    seen, known = point.seen[call], point.places.by_place[point.place]
    expected = known.get(microbatch)
    if seen is None or expected is None:
        return
    action = Action(stage, point.kind, microbatch)
    # Half of the digits is more than a narrower type has, but what went through one shows it in every element.
    same, exact = seen.is_like(expected) and not _rounded(seen, expected), seen.digest == expected.digest
    if point.kind is Kind.BACKWARD and not point.judged:
        same = same or seen.factor(expected) is not None  # by which a runtime may divide later
    really = None if same else _really(point, call, seen, expected)
    yield Crossing(action, point.what, same, exact, really, point.where, point.judged)


def _really(point: _Point, call: int, seen: Sketch, expected: Sketch) -> What:
    """What a tensor is that is not the expected one."""
    owners = sorted(point.owners(call))
    if owners and not _rounded(seen, expected):
        return What("other", f"microbatch {owners[0]}'s")
    if seen.shape != expected.shape:
        return What("shape", f"shape {list(seen.shape)} in place of {list(expected.shape)}")
    if not math.isfinite(seen.norm):
        return What("not-finite", "not finite")
    if not seen.norm:
        return What("zero", "zero")
    if _rounded(seen, expected):
        return What("rounded", f"{seen.narrow}-rounded")
    factor = seen.factor(expected)
    if factor is not None:
        return What("multiple", f"{factor:.6g} times its own", factor=factor)
    elsewhere = next(point.places.find(seen), None)
    if elsewhere is not None:
        return What("other", f"microbatch {elsewhere[1]}'s {elsewhere[0]}")
    return What("different", f"no microbatch's: relative error about {seen.distance(expected):.1g}")


def _rounded(seen: Sketch, expected: Sketch) -> bool:
    """Whether this is the expected tensor, gone through a narrower type."""
    return bool(seen.narrow) and not expected.narrow and seen.distance(expected) <= _ROUNDED
