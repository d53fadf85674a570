"""Which microbatch each call of a watched stage was about: told by content, by its neighbours, or not at all."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from pipeproof.diagnosis.sketches import recognised
from pipeproof.foreign.survey import REPLICA, Both, Places, handed_on
from pipeproof.observers.observed import INPUT, UNKNOWN_MICROBATCH
from pipeproof.observers.recording import GIVEN, HANDED_ON, KEPT, MADE, RECEIVED
from pipeproof.observers.sketch import Sketch
from pipeproof.observers.watching import Call
from pipeproof.pipeline.action import Kind
from pipeproof.reference.handed_on import Cut


@dataclass(frozen=True)
class Column:
    """One tensor of every call, and where in the reference it passes.

    ``places`` are those of its flow, ``elsewhere`` those of the other. ``own`` are the places that its content tells;
    ``place`` is the one where it should pass, empty where nobody knows; ``judged`` only where its content tells it.
    """

    kind: Kind
    where: str
    what: str
    number: int
    seen: tuple[Sketch | None, ...]
    places: Places
    elsewhere: Places
    own: tuple[str, ...]
    place: str
    judged: bool

    @property
    def known(self) -> Mapping[int, Sketch]:
        """What passes there in the reference, by microbatch."""
        return self.places.by_place.get(self.place, {})

    def owners(self, seen: Sketch | None) -> set[int]:
        """The microbatches whose tensor ``seen`` is."""
        return set() if seen is None else {number for number, one in self.known.items() if seen.is_like(one)}

    def makers(self, seen: Sketch | None) -> set[int]:
        """The microbatches of whose tensor ``seen`` was made, and which it still shows."""
        return set() if seen is None else recognised(seen, self.known)


@dataclass(frozen=True)
class Order:
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


def columns(calls: Sequence[Call], places: Both) -> Iterator[Column]:
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
            seen = tuple(member.get(number) for member in members)
            own = known.usual(seen)
            name = f"{what} {number}" if number else what
            yield Column(kind, where, name, number, seen, known, other, own, own[0] if own else "", bool(own))


def at_once(calls: Sequence[Call], microbatches: int, places: Both) -> Sequence[Call]:
    """``calls``, but as one what are several for each microbatch at places of their own: a block that is applied twice.

    Such a one begins as the first of them does, and ends as the last.
    """
    times, rest = divmod(len(calls), microbatches)
    if times < 2 or rest:
        return calls
    turns = [calls[k::times] for k in range(times)]
    told = [[column for column in columns(turn, places) if column.where == MADE and column.own] for turn in turns]
    ends = {tuple(column.own for column in seen) for seen in told}
    if len(ends) < times or () in ends or len({tuple(by_content(seen, microbatches)) for seen in told}) > 1:
        return calls
    return [_joined(one) for one in zip(*turns, strict=True)]


def _joined(calls: Sequence[Call]) -> Call:
    first, last = calls[0], calls[-1]
    return replace(
        first,
        training=any(call.training for call in calls),
        outputs=last.outputs,
        output_gradients=last.output_gradients,
        backwards=first.backwards or last.backwards,
    )


def without_trial(calls: Sequence[Call], microbatches: int, places: Both) -> Sequence[Call]:
    """``calls`` but for those too many that no gradient came back to, as a metric's, and for a first too many.

    By that a runtime learns shapes: its microbatch comes again, or none. Were such a call more than a trial, the
    gradients would show it.
    """
    trained = [call for call in calls if call.backwards]
    if len(trained) == microbatches:
        return trained
    if len(calls) != microbatches + 1:
        return calls
    first, *others = by_content(list(columns(calls, places)), len(calls))
    return calls[1:] if first is None or first in others else calls


def last_pass(calls: Sequence[Call], microbatches: int) -> Sequence[Call]:
    """The last calls, one for each of the microbatches: of those that a backward came to, if it came to any."""
    return ([call for call in calls if call.backwards] or calls)[-microbatches:]


def orders(stages: Mapping[int, tuple[Sequence[Call], Sequence[Column]]], microbatches: int) -> dict[int, Order]:
    """The order of every stage: first by content, then by what one stage handed another, then by what is left."""
    found = {stage: by_content(seen, len(calls)) for stage, (calls, seen) in stages.items()}
    inferred: dict[int, dict[int, str]] = {stage: {} for stage in stages}
    passed = {pair: _handed(*(stages[stage][0] for stage in pair)) for pair in pairwise(sorted(stages)) if _next(pair)}
    while _link(found, passed, inferred) or _eliminate(found, microbatches, inferred):
        pass
    return {
        stage: Order(
            tuple(UNKNOWN_MICROBATCH if number is None else number for number in numbers),
            tuple(number for number in range(microbatches) if number not in numbers),
            inferred[stage],
        )
        for stage, numbers in found.items()
    }


def by_content(seen: Sequence[Column], calls: int) -> list[int | None]:
    """The microbatch of each call whose own tensors tell it.

    Equal microbatches nobody can tell apart: a call that may be any of several takes its own number if it can.
    """
    candidates = [_candidates(seen, call) for call in range(calls)]
    found = [next(iter(those)) if len(those) == 1 else None for those in candidates]
    for call, those in enumerate(candidates):
        if len(those) > 1:
            free = sorted(those - set(found)) or sorted(those)
            found[call] = call if call in free else free[0]
    return found


def _candidates(seen: Sequence[Column], call: int) -> set[int]:
    """What came in tells first, then what went out, then what that was made of, then what flowed back.

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
        sets = [owners for column in seen if column.where in where and (owners := told(column, column.seen[call]))]
        common = set.intersection(*sets) if sets else set()
        found = (found & common or found) if found else common
    return found


def _next(pair: tuple[int, int]) -> bool:
    return pair[1] == pair[0] + 1


def _handed(before: Sequence[Call], after: Sequence[Call]) -> list[tuple[int, int]]:
    """Calls of a stage and of the one after it between which a tensor passed that no others have, bit for bit."""
    down = [_tensors(call.outputs, call.output_gradients) for call in before]
    up = [_tensors(call.inputs, call.input_gradients) for call in after]
    times = [Counter(one for call in calls for one in call) for calls in (down, up)]
    single = {one for one, count in times[0].items() if count == 1 == times[1][one]}
    return [(k, j) for k, one in enumerate(down) for j, other in enumerate(up) if one & other & single]


def _tensors(forward: Sequence[Sketch], backward: Mapping[int, Sketch]) -> set[tuple[Kind, bytes]]:
    """What is not zero: that is nobody's in particular."""
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


_FLOWING = {RECEIVED: MADE, HANDED_ON: GIVEN}  # the tensor that a gradient is of
_FLOWS = {MADE: (RECEIVED, "output gradient"), GIVEN: (HANDED_ON, "input gradient")}
Stages = Mapping[int, Sequence[Column]]
Cuts = Mapping[int, Cut]


def structured(stages: Stages, places: Both, note: Callable[[Cuts], None]) -> dict[int, list[Column]]:
    """The columns of every stage, with places by structure for what has none of its own: for a diagnosis alone.

    A gradient is at its tensor's place even where it is like that of another, and is missed where it never came. Of
    some a stage has a part: ``note`` notes those parts among the places of gradients.
    """
    tensors = {stage: [_settled(one, stage, stages) for one in columns] for stage, columns in stages.items()}
    cuts, divided = _cuts(tensors, places)
    note(cuts)
    for stage, columns in tensors.items():
        flow = _Flow(stage, columns, places, divided[stage])
        settled = [flow.settled(one) for one in columns]
        tensors[stage] = [*settled, *flow.missed(settled)]
    return tensors


def _settled(column: Column, stage: int, stages: Stages) -> Column:
    """``column`` of tensors at the place that its neighbours tell, where its own content tells none.

    Nor does it where it is what comes in beside it, and the stage before hands on two.
    """
    beside = [one for one in stages[stage] if (one.where, one.number) < (column.where, column.number)]
    before = [one for one in stages.get(stage - 1, ()) if (one.where, one.number) == (MADE, column.number)]
    if column.where == GIVEN and any(one.where == GIVEN and one.own and one.own == column.own for one in beside):
        for one in before:
            if one.own and not set(one.own) & set(column.own) and _fits(column, one.place):
                return replace(column, own=(), place=one.place, judged=False)
    if column.place or column.where not in (GIVEN, MADE, KEPT):
        return column
    fitting = (place for place in _neighbours(column, stage, stages) if _fits(column, place))
    return replace(column, place=next(fitting, ""))


def _neighbours(column: Column, stage: int, stages: Stages) -> Iterator[str]:
    """What is made from a tensor, what it is made from, and where other stages have theirs of the same number."""
    number = column.number
    if column.where == MADE:
        yield from _at(stages, stage + 1, GIVEN, number)
        return
    if column.where == KEPT:
        yield from _at(stages, stage, GIVEN, number)
    if stage:
        yield from _at(stages, stage - 1, MADE, number)
        for other in filter(None, stages):  # what comes into a later stage beside what flows is data of the model's
            yield from (place for place in _at(stages, other, GIVEN, number) if place.startswith(INPUT))
    else:
        yield f"{INPUT} {number}"


def _at(stages: Stages, stage: int, where: str, number: int) -> Iterator[str]:
    yield from (one.place for one in stages.get(stage, ()) if (one.where, one.number) == (where, number) and one.place)


def _fits(column: Column, place: str) -> bool:
    known = column.places.by_place.get(place, {})
    forms = {(one.shape, one.dtype) for one in known.values()}
    return bool(known) and all(one is None or (one.shape, one.dtype) in forms for one in column.seen)


def _cuts(stages: Stages, places: Both) -> tuple[Cuts, Mapping[int, frozenset[str]]]:
    """The places of tensors of whose gradient each stage may hand on a part alone, and the stages where it is known.

    Such a tensor comes into several stages, or beside another one, which may be made of it.
    """
    _, backward = places
    at = {
        (stage, where): [one.place for one in columns if one.where == where]
        for stage, columns in stages.items()
        for where in (GIVEN, MADE)
    }
    flowing = {stage: [place for place in at[stage, GIVEN] if place in backward.by_place] for stage in stages}
    times = Counter(place for given in flowing.values() for place in given)
    divided = {
        stage: frozenset(given if len(given) > 1 else (place for place in given if times[place] > 1))
        for stage, given in flowing.items()
    }
    cuts = {
        stage: Cut(frozenset(given), frozenset(at[stage, MADE]))
        for stage, given in flowing.items()
        if divided[stage] and all(at[stage, MADE]) and len(set(given)) == len(given)
    }
    return cuts, divided


@dataclass(frozen=True)
class _Flow:
    """The gradients of a stage, whose tensors are settled; of ``divided`` places it may have a part alone."""

    stage: int
    columns: Sequence[Column]
    places: Both
    divided: frozenset[str]

    def settled(self, column: Column) -> Column:
        """``column`` of gradients at the place of the tensors that they are of."""
        tensor = self._of.get((_FLOWING.get(column.where, ""), column.number))
        if tensor is None or not tensor.place:
            return column
        places = self._places(tensor)
        here = {place + of_replica for place in places for of_replica in ("", REPLICA)}
        own = [place for place in column.places.usual(column.seen) if place in here]
        if not own and not (places and places[0] in column.places.by_place):
            return column
        return replace(column, own=tuple(own) or column.own, place=[*own, *places][0], judged=bool(own))

    def missed(self, came: Sequence[Column]) -> Iterator[Column]:
        """A column of nothing for each gradient that the reference has and that no call was seen to have."""
        forward, backward = self.places
        there = {(one.where, one.number) for one in came}
        for tensor in self._of.values():
            where, what = _FLOWS.get(tensor.where, ("", ""))
            place = next(iter(self._places(tensor)), "")
            if where and (where, tensor.number) not in there and place in backward.by_place:
                name = f"{what} {tensor.number}" if tensor.number else what
                nothing = (None,) * len(tensor.seen)
                yield Column(
                    Kind.BACKWARD, where, name, tensor.number, nothing, backward, forward, (), place, judged=False
                )

    def _places(self, tensor: Column) -> Sequence[str]:
        """Where the gradient of ``tensor`` passes; nowhere if a part of it passes here, and nobody knows which."""
        _, backward = self.places
        if tensor.place not in self.divided:
            return tensor.place, *tensor.own
        part = handed_on(tensor.place, self.stage)
        return (part,) if part in backward.by_place else ()

    @property
    def _of(self) -> Mapping[tuple[str, int], Column]:
        """The tensors."""
        return {(one.where, one.number): one for one in self.columns if one.kind is Kind.FORWARD}
