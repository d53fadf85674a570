"""Which microbatch each call of a watched stage was about: told by content, by its neighbours, or not at all."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise

from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.observed import UNKNOWN_MICROBATCH
from pipeproof.core.observe.recording import GIVEN, HANDED_ON, KEPT, MADE, RECEIVED
from pipeproof.core.observe.sketch import Sketch
from pipeproof.explain.sketches import recognised
from pipeproof.pipeline.action import Kind
from pipeproof.whitebox.survey import Both, Places


@dataclass(frozen=True)
class Column:
    """One tensor of every call, and where in the reference it passes.

    ``places`` are those of its flow, ``elsewhere`` those of the other. ``own`` are the places that its content tells;
    ``place`` is the one where it should pass, empty if that is unknown; ``judged`` only where its content tells it.
    """

    kind: Kind
    where: str
    what: str
    number: int
    observed: tuple[Sketch | None, ...]
    places: Places
    elsewhere: Places
    own: tuple[str, ...]
    place: str
    judged: bool

    @property
    def known(self) -> Mapping[int, Sketch]:
        """What passes there in the reference, by microbatch."""
        return self.places.get(self.place, {})

    @property
    def is_whole_numbers(self) -> bool:
        """Whether no gradient can flow through it, as through words, positions and masks."""
        return not any(one is not None and one.dtype.is_floating_point for one in self.observed)

    def owners(self, observed: Sketch | None) -> set[int]:
        """The microbatches whose tensor ``observed`` is."""
        return set() if observed is None else {number for number, one in self.known.items() if observed.is_like(one)}

    def makers(self, observed: Sketch | None) -> set[int]:
        """The microbatches of whose tensor ``observed`` was made, and which it still shows."""
        return set() if observed is None else recognised(observed, self.known)


@dataclass(frozen=True)
class CallOrder:
    """The microbatch of every call of a stage, ``UNKNOWN_MICROBATCH`` where nothing tells it.

    ``left`` are those of no call. ``inferred``: of calls whose own tensors do not tell it, what does.
    """

    numbers: tuple[int, ...]
    left: tuple[int, ...]
    inferred: Mapping[int, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether the calls of which nothing tells the microbatch can be those of what is left, one each."""
        told = [number for number in self.numbers if number != UNKNOWN_MICROBATCH]
        return len(told) == len(set(told)) and len(self.numbers) == len(told) + len(self.left)


def columns_of(calls: Sequence[Call], places: Both) -> Iterator[Column]:
    """Every tensor at the boundary, by its content at the place where most of it passes in the reference."""
    forward, backward = places
    flows = (forward, backward), (backward, forward)
    for kind, where, what, part, (known, other) in (
        (Kind.FORWARD, GIVEN, "input", "inputs", flows[0]),
        (Kind.FORWARD, MADE, "output", "outputs", flows[0]),
        (Kind.BACKWARD, KEPT, "input when the backward begins", "kept", flows[0]),
        (Kind.BACKWARD, RECEIVED, "output gradient", "output_gradients", flows[1]),
        (Kind.BACKWARD, HANDED_ON, "input gradient", "input_gradients", flows[1]),
    ):
        rows = [getattr(call, part) for call in calls]
        members = [row if isinstance(row, dict) else dict(enumerate(row)) for row in rows]
        for number in sorted(set().union(*members)):
            observed = tuple(member.get(number) for member in members)
            own = known.usual(observed)
            name = f"{what} {number}" if number else what
            yield Column(kind, where, name, number, observed, known, other, own, own[0] if own else "", bool(own))


def without_extra(calls: Sequence[Call], microbatches: int, places: Both) -> Sequence[Call]:
    """``calls`` but for those beside a microbatch's own: that add nothing, as a metric's or padding, and a trial's.

    A trial is a first call too many, by which a runtime learns shapes; or it is about no microbatch, where others are
    about each. Were any of these more than that, the gradients would show it.
    """
    if len(calls) <= microbatches:
        return calls
    adding = [bool(call.ran) and not call.is_idle for call in calls]
    numbers = by_content(list(columns_of(calls, places)), len(calls))
    added = {number for number, adds in zip(numbers, adding, strict=True) if adds}
    last = {number: k for k, number in enumerate(numbers)}
    own = [k for k, number in enumerate(numbers) if adding[k] or (number not in added and last[number] == k)]
    known = [k for k in own if numbers[k] is not None]
    if len(known) == len({numbers[k] for k in known}) == microbatches:
        return [calls[k] for k in known]
    if len(own) == microbatches + 1 and numbers[own[0]] in {None, *(numbers[k] for k in own[1:])}:
        own = own[1:]
    return [calls[k] for k in own] if len(own) >= microbatches or None not in numbers else calls


def orders(stages: Mapping[int, tuple[Sequence[Call], Sequence[Column]]], microbatches: int) -> dict[int, CallOrder]:
    """The order of every stage: by content that is a microbatch's own, by what one stage handed the next, then by what
    only looks like a microbatch's, then by what was handed back, and by what is left."""
    found: dict[int, list[int | None]] = {stage: [None] * len(calls) for stage, (calls, _) in stages.items()}
    inferred: dict[int, dict[int, str]] = {stage: {} for stage in stages}
    pairs = {pair: tuple(stages[stage][0] for stage in pair) for pair in pairwise(sorted(stages)) if _next(pair)}
    there = {pair: _handed(*calls, back=False) for pair, calls in pairs.items()}
    passed = {pair: _handed(*calls, back=True) for pair, calls in pairs.items()}
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


def by_content(columns: Sequence[Column], calls: int) -> list[int | None]:
    """The microbatch of each call whose own tensors tell it."""
    found: list[int | None] = [None] * calls
    for fill in _FILLS:
        fill(found, columns)
    return found


def _by_inputs(found: list[int | None], columns: Sequence[Column], *, level: int) -> None:
    """Give calls the microbatch of which all is that came in.

    From level 1 on, where tensors of several came in, one of those that most of these are of; at level 2 also where it
    is not known of all.
    """
    for call in _open(found):
        sets = _owners(columns, call)
        known = [owners for owners in sets if owners]
        if not known or (level < 2 and len(known) < len(sets)):
            continue
        common = set.intersection(*known)
        if level == 0 and len(common) == 1:
            found[call] = next(iter(common))
        elif level and not common:
            times = Counter(chain.from_iterable(known))
            found[call] = _chosen(call, {number for number in times if times[number] == max(times.values())}, found)


def _shown(found: list[int | None], columns: Sequence[Column]) -> None:
    """Give calls the microbatch that anything of theirs shows: none that others have, where theirs only looks like it.

    Equal microbatches cannot be told apart: a call that may be any of several takes its own number if it can.
    """
    sure = {number for number in found if number is not None}
    candidates = {call: _candidates(columns, call, sure) for call in _open(found)}
    for call, those in candidates.items():
        found[call] = next(iter(those)) if len(those) == 1 else None
    for call, those in candidates.items():
        if len(those) > 1:
            found[call] = _chosen(call, those, found)


def _open(found: Sequence[int | None]) -> list[int]:
    return [call for call, number in enumerate(found) if number is None]


def _chosen(call: int, those: set[int], found: Sequence[int | None]) -> int:
    free = sorted(those - set(found)) or sorted(those)
    return call if call in free else free[0]


def _owners(columns: Sequence[Column], call: int) -> list[set[int]]:
    """The microbatches of each tensor that came in."""
    return [column.owners(column.observed[call]) for column in columns if column.where == GIVEN]


def _candidates(columns: Sequence[Column], call: int, sure: Collection[int] = ()) -> set[int]:
    """What came in tells first, then what went out, then what that was made of, then what flowed back.

    Some tensors look by chance as if they were made of one that another call, of those that are ``sure``, had.
    Where a microbatch's tensor is another's too, those that come after it decide between them.
    """
    found: set[int] = set()
    for told, where in (
        (Column.owners, (GIVEN,)),
        (Column.owners, (MADE,)),
        (Column.makers, (GIVEN,)),
        (Column.makers, (MADE,)),
        (Column.owners, (KEPT,)),
        (Column.owners, (RECEIVED, HANDED_ON)),
    ):
        if len(found) == 1 or (found and told is Column.makers):
            continue
        others = set(sure) if told is Column.makers else set[int]()
        shown = (told(column, column.observed[call]) - others for column in columns if column.where in where)
        sets = [owners for owners in shown if owners]
        common = set.intersection(*sets) if sets else set()
        found = (found & common or found) if found else common
    return found


_FILLS: Sequence[Callable[[list[int | None], Sequence[Column]], None]] = (
    partial(_by_inputs, level=0),
    partial(_by_inputs, level=1),
    partial(_by_inputs, level=2),
    _shown,
)


def _next(pair: tuple[int, int]) -> bool:
    return pair[1] == pair[0] + 1


def _handed(before: Sequence[Call], after: Sequence[Call], *, back: bool) -> list[tuple[int, int]]:
    """Calls of a stage and of the one after it between which a tensor passed that no others have, bit for bit.

    Not those that had tensors of several. ``back``: on the way back, too, where a graph may have been another's.
    """
    down = [_tensors(call.outputs, call.output_gradients if back else {}) for call in before]
    up = [_tensors(call.inputs, call.input_gradients if back else {}) for call in after]
    times = [Counter(one for call in calls for one in call) for calls in (down, up)]
    single = {one for one, count in times[0].items() if count == 1 == times[1][one]}
    pairs = [(k, j) for k, one in enumerate(down) for j, other in enumerate(up) if one & other & single]
    several = [{end for end, count in Counter(ends).items() if count > 1} for ends in zip(*pairs, strict=True)]
    return [(k, j) for k, j in pairs if k not in several[0] and j not in several[1]]


def _tensors(forward: Sequence[Sketch], backward: Mapping[int, Sketch]) -> set[tuple[Kind, bytes]]:
    """What is not zero: that is no call's own."""
    flows = ((Kind.FORWARD, forward), (Kind.BACKWARD, backward.values()))
    return {(kind, one.digest) for kind, sketches in flows for one in sketches if one.norm}


def _link(
    found: Mapping[int, list[int | None]],
    passed: Mapping[tuple[int, int], Sequence[tuple[int, int]]],
    inferred: Mapping[int, dict[int, str]],
) -> bool:
    """Give calls the microbatch of the one that they had a tensor from, or gave one; whether there was any."""
    some = False
    for (before, after), pairs in passed.items():
        for ends in (((before, k), (after, j)) for k, j in pairs):
            for (stage, call), (other, its) in (ends, ends[::-1]):
                if found[stage][call] is None and found[other][its] is not None:
                    found[stage][call], some = found[other][its], True
                    inferred[stage][call] = f"what passed between it and stage {other} tells it"
    return some


def _eliminate(
    found: Mapping[int, list[int | None]], microbatches: int, inferred: Mapping[int, dict[int, str]]
) -> bool:
    """Give the one call that is left the one microbatch that is left; whether there was any."""
    for stage, numbers in found.items():
        left = set(range(microbatches)) - set(numbers)
        if len(numbers) == microbatches and len(left) == 1 == numbers.count(None):
            call = numbers.index(None)
            numbers[call] = left.pop()
            inferred[stage][call] = "no other call was about that"
            return True
    return False
