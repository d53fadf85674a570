"""Which microbatch each call of a watched stage was about, and whether what passed its boundary is the reference's."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.action import Action, Kind
from validation.observed import Crossing
from validation.whitebox.places import Both, Places
from validation.whitebox.sketch import Sketch
from validation.whitebox.watching import Call


@dataclass(frozen=True)
class Passed:
    """A stage's actions in the order in which they ran, its module's calls, and what crossed its boundary."""

    actions: tuple[Action, ...]
    called: tuple[tuple[Action, bool], ...]
    crossings: tuple[Crossing, ...]


@dataclass(frozen=True)
class _Point:
    """One tensor of every call, and where in the reference it passes."""

    kind: Kind
    what: str
    seen: tuple[Sketch | None, ...]
    places: Places
    place: str

    def owners(self, call: int) -> set[int]:
        """The microbatches whose tensor the one of this call is."""
        seen = self.seen[call]
        known = self.places.by_place[self.place]
        return set() if seen is None else {number for number, one in known.items() if seen.is_like(one)}


def passed(stage: int, calls: Sequence[Call], microbatches: int, places: Both) -> Passed:
    """What the calls of ``stage`` were; ``places`` are those of tensors and of gradients."""
    calls = _without_trial(calls, microbatches, places)
    points = list(_points(calls, places))
    order = _microbatches(points, len(calls), microbatches)
    ends = sorted((end, order[k]) for k, call in enumerate(calls) for end in call.backwards)
    forwards = [Action(stage, Kind.FORWARD, microbatch) for microbatch in order]
    backwards = [Action(stage, Kind.BACKWARD, microbatch) for _, microbatch in ends]
    called = tuple((action, call.training) for action, call in zip(forwards, calls, strict=True))
    crossings = tuple(
        crossing
        for point in points
        for k, number in enumerate(order)
        for crossing in _crossing(stage, point, k, number)
    )
    return Passed((*forwards, *backwards), called, crossings)


def _without_trial(calls: Sequence[Call], microbatches: int, places: Both) -> Sequence[Call]:
    """``calls`` but for a first too many, by which a runtime learns shapes: its microbatch comes again, or none.

    Were it more than a trial, the gradients would show it.
    """
    if len(calls) != microbatches + 1:
        return calls
    points = list(_points(calls, places))
    first, *others = (_owner(points, k) for k in range(len(calls)))
    return calls[1:] if first is None or first in others else calls


def _points(calls: Sequence[Call], places: Both) -> Iterator[_Point]:
    """Every tensor at the boundary that has a place in the reference; others are the runtime's own affair."""
    forward, backward = places
    for kind, what, field, known in (
        (Kind.FORWARD, "input", "inputs", forward),
        (Kind.FORWARD, "output", "outputs", forward),
        (Kind.BACKWARD, "input when the backward begins", "kept", forward),
        (Kind.BACKWARD, "output gradient", "output_gradients", backward),
        (Kind.BACKWARD, "input gradient", "input_gradients", backward),
    ):
        rows = [getattr(call, field) for call in calls]
        columns = [row if isinstance(row, dict) else dict(enumerate(row)) for row in rows]
        for number in sorted(set().union(*columns)):
            seen = tuple(column.get(number) for column in columns)
            place = known.usual(seen)
            if place is not None:
                yield _Point(kind, f"{what} {number}" if number else what, seen, known, place)


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
    same, exact = seen.is_like(expected), seen.digest == expected.digest
    yield Crossing(action, point.what, same, exact, "" if same else _told(point, call, seen, expected))


def _told(point: _Point, call: int, seen: Sketch, expected: Sketch) -> str:
    owners = sorted(point.owners(call))
    if owners:
        return f"microbatch {owners[0]}'s"
    if seen.shape != expected.shape:
        return f"shape {list(seen.shape)} in place of {list(expected.shape)}"
    return f"no microbatch's: relative error about {seen.distance(expected):.1g}"
