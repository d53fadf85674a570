"""Match watched calls with microbatches: by content, by neighbours, or not at all."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise

from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.observed import UNKNOWN_MICROBATCH
from pipeproof.core.observe.recording import GIVEN, HANDED_ON, KEPT, MADE, RECEIVED
from pipeproof.core.observe.sketch import Sketch
from pipeproof.explain.sketches import recognise
from pipeproof.pipeline.action import Kind
from pipeproof.whitebox.tensor_index import Both, Places


@dataclass(frozen=True)
class Column:
    """One tensor across all calls, with its place in the reference.

    places: its flow's places; elsewhere: the other flow's. own: places implied by content. place: expected place; empty
    if unknown. judged: only if content implies it.
    """

    kind: Kind
    where: str
    what: str
    number: int
    observed: tuple[Sketch | None, ...]
    places: Places
    elsewhere: Places
    own: tuple[str, ...] = ()
    place: str = ""
    judged: bool = False

    @property
    def known(self) -> Mapping[int, Sketch]:
        """Reference tensors at its place, by microbatch."""
        return self.places.get(self.place, {})

    def owners(self, observed: Sketch | None) -> set[int]:
        """Return microbatches whose tensor equals ``observed``."""
        return set() if observed is None else {number for number, one in self.known.items() if observed.is_like(one)}

    def makers(self, observed: Sketch | None) -> set[int]:
        """Return microbatches whose tensor produced ``observed`` recognisably."""
        return set() if observed is None else recognise(observed, self.known)


@dataclass(frozen=True)
class CallOrder:
    """Microbatch per call, ``UNKNOWN_MICROBATCH`` if unknown.

    left: microbatches without a call. inferred: reasons for numbers from other evidence than the call's own tensors.
    """

    numbers: tuple[int, ...]
    left: tuple[int, ...]
    inferred: Mapping[int, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """True if unknown calls and missing microbatches match in number."""
        known = [number for number in self.numbers if number != UNKNOWN_MICROBATCH]
        return len(known) == len(set(known)) and len(self.numbers) == len(known) + len(self.left)


_BOUNDARIES = {  # by point: its kind, words for its tensors, and what they are of a call
    GIVEN: (Kind.FORWARD, "input", "inputs"),
    MADE: (Kind.FORWARD, "output", "outputs"),
    KEPT: (Kind.BACKWARD, "input when the backward begins", "kept"),
    RECEIVED: (Kind.BACKWARD, "output gradient", "output_gradients"),
    HANDED_ON: (Kind.BACKWARD, "input gradient", "input_gradients"),
}


def columns_at(where: str, calls: Sequence[Call], places: Both, numbers: Collection[int] = ()) -> Iterator[Column]:
    """Yield boundary tensors at a point, observed or of these ``numbers``. ``places``: tensors, and gradients."""
    kind, what, part = _BOUNDARIES[where]
    rows = [getattr(call, part) for call in calls]
    members = [row if isinstance(row, dict) else dict(enumerate(row)) for row in rows]
    known, other = places[::-1] if where in (RECEIVED, HANDED_ON) else places
    for number in sorted(set().union(numbers, *members)):
        observed, name = tuple(member.get(number) for member in members), f"{what} {number}" if number else what
        yield Column(kind, where, name, number, observed, known, other)


def columns_of(calls: Sequence[Call], places: Both) -> Iterator[Column]:
    """Yield boundary tensors, each placed where most calls match the reference."""
    for column in (column for where in _BOUNDARIES for column in columns_at(where, calls, places)):
        own = column.places.usual(column.observed)
        yield replace(column, own=own, place=own[0] if own else "", judged=bool(own))


def drop_extra(calls: Sequence[Call], microbatches: int, places: Both) -> Sequence[Call]:
    """Drop calls beyond the microbatches: metrics, padding, and shape probes.

    A probe is a surplus first call, or one without a microbatch where all others have one. A call with other effects
    would show in gradients.
    """
    if len(calls) <= microbatches:
        return calls
    adding, columns = [*map(may_add, calls)], list(columns_of(calls, places))
    numbers: list[int | None] = [None] * len(calls)
    for fill in _FILLS:
        fill(numbers, columns)
    added = {number for number, adds in zip(numbers, adding, strict=True) if adds}
    last = {number: k for k, number in enumerate(numbers)}
    own = [k for k, number in enumerate(numbers) if adding[k] or (number not in added and last[number] == k)]
    known = [k for k in own if numbers[k] is not None]
    if len(known) == len({numbers[k] for k in known}) == microbatches:
        return [calls[k] for k in known]
    if len(own) == microbatches + 1 and numbers[own[0]] in {None, *(numbers[k] for k in own[1:])}:
        own = own[1:]
    return [calls[k] for k in own] if len(own) >= microbatches or None not in numbers else calls


def may_add(call: Call) -> bool:
    """True if the call's backward may have added to gradients."""
    return bool(call.ran) and not call.is_idle


def orders(stages: Mapping[int, tuple[Sequence[Call], Sequence[Column]]], microbatches: int) -> dict[int, CallOrder]:
    """Return each stage's call order.

    Evidence, strongest first: unique content, tensors passed forward, similar content, tensors passed back,
    elimination.
    """
    found: dict[int, list[int | None]] = {stage: [None] * len(calls) for stage, (calls, _) in stages.items()}
    inferred: dict[int, dict[int, str]] = {stage: {} for stage in stages}
    pairs = {
        pair: tuple(stages[stage][0] for stage in pair) for pair in pairwise(sorted(stages)) if pair[1] == pair[0] + 1
    }
    there = {pair: _pairs_between(*calls, back=False) for pair, calls in pairs.items()}
    passed = {pair: _pairs_between(*calls, back=True) for pair, calls in pairs.items()}
    for fill in _FILLS:
        for stage, (_, columns) in stages.items():
            fill(found[stage], columns)
        while _link(found, there, inferred):
            pass
    while _link(found, passed, inferred) or _eliminate(found, microbatches, inferred):
        pass
    return {
        stage: CallOrder(
            tuple(UNKNOWN_MICROBATCH if number is None else number for number in numbers),
            tuple(number for number in range(microbatches) if number not in numbers),
            {k: why for k, why in inferred[stage].items() if _candidates(stages[stage][1], k) != {numbers[k]}},
        )
        for stage, numbers in found.items()
    }


def _by_inputs(found: list[int | None], columns: Sequence[Column], *, level: int) -> None:
    """Assign calls by inputs from a single microbatch.

    From level 1 on, a majority among the inputs suffices; at level 2 some inputs may be unknown.
    """
    for call in [k for k, number in enumerate(found) if number is None]:
        sets = [column.owners(column.observed[call]) for column in columns if column.where == GIVEN]
        known = [owners for owners in sets if owners]
        if not known or (level < 2 and len(known) < len(sets)):
            continue
        common = set.intersection(*known)
        if level == 0 and len(common) == 1:
            found[call] = next(iter(common))
        elif level and not common:
            times = Counter(chain.from_iterable(known))
            found[call] = _choose(call, {number for number in times if times[number] == max(times.values())}, found)


def _match_shown(found: list[int | None], columns: Sequence[Column]) -> None:
    """Assign calls by any matching tensor. Mere similarity never takes a number already in use.

    Equal microbatches look alike: an ambiguous call takes its own index if possible.
    """
    sure = {number for number in found if number is not None}
    candidates = {call: _candidates(columns, call, sure) for call, number in enumerate(found) if number is None}
    for call, those in candidates.items():
        found[call] = next(iter(those)) if len(those) == 1 else None
    for call, those in candidates.items():
        if len(those) > 1:
            found[call] = _choose(call, those, found)


def _choose(call: int, those: set[int], found: Sequence[int | None]) -> int:
    free = sorted(those - set(found)) or sorted(those)
    return call if call in free else free[0]


def _candidates(columns: Sequence[Column], call: int, sure: Collection[int] = ()) -> set[int]:
    """Return candidates from inputs, then outputs, then their sources, then gradients.

    Chance may make a tensor resemble the source in another, ``sure`` call. Tensors shared by microbatches leave the
    decision to later ones.
    """
    found: set[int] = set()
    for related, where in (
        (Column.owners, (GIVEN,)),
        (Column.owners, (MADE,)),
        (Column.makers, (GIVEN,)),
        (Column.makers, (MADE,)),
        (Column.owners, (KEPT,)),
        (Column.owners, (RECEIVED, HANDED_ON)),
    ):
        if len(found) == 1 or (found and related is Column.makers):
            continue
        others = set(sure) if related is Column.makers else set[int]()
        shown = (related(column, column.observed[call]) - others for column in columns if column.where in where)
        sets = [owners for owners in shown if owners]
        common = set.intersection(*sets) if sets else set()
        found = (found & common or found) if found else common
    return found


_FILLS: Sequence[Callable[[list[int | None], Sequence[Column]], None]] = (
    partial(_by_inputs, level=0),
    partial(_by_inputs, level=1),
    partial(_by_inputs, level=2),
    _match_shown,
)


def _pairs_between(before: Sequence[Call], after: Sequence[Call], *, back: bool) -> list[tuple[int, int]]:
    """Pair calls in adjacent stages by unique tensors passed between them, bit for bit.

    Excludes calls with tensors from several others. ``back``: include gradients, where graphs may be mixed up.
    """
    down = [_tensors(call.outputs, call.output_gradients if back else {}) for call in before]
    up = [_tensors(call.inputs, call.input_gradients if back else {}) for call in after]
    times = [Counter(one for call in calls for one in call) for calls in (down, up)]
    single = {one for one, count in times[0].items() if count == 1 == times[1][one]}
    pairs = [(k, j) for k, one in enumerate(down) for j, other in enumerate(up) if one & other & single]
    several = [{end for end, count in Counter(ends).items() if count > 1} for ends in zip(*pairs, strict=True)]
    return [(k, j) for k, j in pairs if k not in several[0] and j not in several[1]]


def _tensors(forward: Sequence[Sketch], backward: Mapping[int, Sketch]) -> set[tuple[Kind, bytes]]:
    """Return nonzero contents: zeros identify no call."""
    flows = ((Kind.FORWARD, forward), (Kind.BACKWARD, backward.values()))
    return {(kind, one.digest) for kind, sketches in flows for one in sketches if one.norm}


def _link(
    found: Mapping[int, list[int | None]],
    passed: Mapping[tuple[int, int], Sequence[tuple[int, int]]],
    inferred: Mapping[int, dict[int, str]],
) -> bool:
    """Number calls by their paired calls. True after any change."""
    some = False
    for (before, after), pairs in passed.items():
        for ends in (((before, k), (after, j)) for k, j in pairs):
            for (stage, call), (other, its) in (ends, ends[::-1]):
                if found[stage][call] is None and found[other][its] is not None:
                    found[stage][call], some = found[other][its], True
                    inferred[stage][call] = f"it follows from what passed between it and stage {other}"
    return some


def _eliminate(
    found: Mapping[int, list[int | None]], microbatches: int, inferred: Mapping[int, dict[int, str]]
) -> bool:
    """Give a stage's last call the last microbatch. True after a change."""
    for stage, numbers in found.items():
        left = set(range(microbatches)) - set(numbers)
        if len(numbers) == microbatches and len(left) == 1 == numbers.count(None):
            call = numbers.index(None)
            numbers[call] = left.pop()
            inferred[stage][call] = "no other call was about that"
            return True
    return False
