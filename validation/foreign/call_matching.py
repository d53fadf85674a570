"""Which microbatch each call of a watched stage was about: told by content, by its neighbours, or not at all."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

from torch import Tensor, nn

from pipeline.action import Kind
from reference.data import Batch
from reference.outputs import outputs_noted
from validation.observers.observed import INPUT, UNKNOWN_MICROBATCH
from validation.observers.recording import GIVEN, HANDED_ON, KEPT, MADE, RECEIVED
from validation.observers.sketch import Sketch, recognised, sketch
from validation.observers.watching import Call

REPLICA = " of a replica"
Result = TypeVar("Result")


class Places:
    """Sketches by place, one for each microbatch; a place is a module's n-th output, or the model's n-th input."""

    def __init__(self) -> None:
        self.by_place: dict[str, dict[int, Sketch]] = {}
        self._by_content: dict[bytes, list[tuple[str, int]]] = {}

    def note(self, place: str, microbatch: int, tensor: Tensor) -> None:
        """``tensor`` passed there."""
        made = self.by_place.setdefault(place, {})[microbatch] = sketch(tensor)
        self._by_content.setdefault(made.digest, []).append((place, microbatch))

    def find(self, seen: Sketch) -> Iterator[tuple[str, int]]:
        """Every (place, microbatch) whose tensor ``seen`` is: bit for bit, or if none is, up to rounding."""
        if seen.digest in self._by_content:
            yield from self._by_content[seen.digest]
            return
        for place, sketches in self.by_place.items():
            for microbatch, known in sketches.items():
                if seen.is_like(known):
                    yield place, microbatch

    def usual(self, seen: Sequence[Sketch | None]) -> tuple[str, ...]:
        """The places where most of ``seen`` pass, each for another microbatch; none if none of them passes anywhere.

        What is zero may be so in many places, and says nothing beside what is not.
        """
        there = [one for one in seen if one is not None]
        found: dict[str, set[int]] = {}
        for one in [one for one in there if one.norm] or there:
            for place, microbatch in self.find(one):
                found.setdefault(place, set()).add(microbatch)
        most = max(map(len, found.values()), default=0)
        return tuple(place for place, numbers in found.items() if len(numbers) == most)


Both = tuple[Places, Places]  # of tensors, and of gradients


class Survey:
    """Looks where in ``model`` what passes, while it is trained on one microbatch after another.

    A replica whose share is to be averaged with others has gradients that are ``replicas`` times as large.
    """

    def __init__(self, model: nn.Module, *, replicas: int = 1) -> None:
        self.places: Both = Places(), Places()
        self._model = model
        self._replicas = replicas

    def watch(self, microbatch: int, batch: Batch, train: Callable[[], Result]) -> Result:
        """What ``train`` returns, which trains the model on ``batch``."""
        forward, _ = self.places
        for number, tensor in enumerate(batch.inputs):
            forward.note(f"{INPUT} {number}", microbatch, tensor)
        with outputs_noted(self._model, lambda place, tensor: self._note(place, microbatch, tensor)):
            return train()

    def _note(self, place: str, microbatch: int, tensor: Tensor) -> None:
        """A module has put out ``tensor``; its gradient is noted when it flows."""
        forward, _ = self.places
        forward.note(place, microbatch, tensor)
        if tensor.requires_grad:
            tensor.register_hook(lambda gradient: self._flowed(place, microbatch, gradient))  # type: ignore[no-untyped-call]  # in torch

    def _flowed(self, place: str, microbatch: int, gradient: Tensor) -> None:
        _, backward = self.places
        backward.note(place, microbatch, gradient)
        if self._replicas > 1:
            backward.note(f"{place}{REPLICA}", microbatch, gradient * self._replicas)


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
                    inferred[stage][call] = f"by what passed between it and stage {other}"
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
            inferred[stage][call] = "is the one that no other call was about"
            return True
    return False


_FLOWING = {RECEIVED: MADE, HANDED_ON: GIVEN}  # the tensor that a gradient is of
_FLOWS = {MADE: (RECEIVED, "output gradient"), GIVEN: (HANDED_ON, "input gradient")}
Stages = Mapping[int, Sequence[Column]]


def structured(stages: Stages, places: Both) -> dict[int, list[Column]]:
    """The columns of every stage, with places by structure for what has none of its own: for a diagnosis alone.

    A gradient is at its tensor's place even where it is like that of another, and is missed where it never came.
    """
    tensors = {stage: [_settled(one, stage, stages) for one in columns] for stage, columns in stages.items()}
    carried = _carried(tensors)
    for stage, columns in tensors.items():
        of = {(one.where, one.number): one for one in columns if one.kind is Kind.FORWARD}
        settled = [_flowing(one, of, carried) for one in columns]
        tensors[stage] = settled + [one for one in _missed(settled, of, places) if one.place not in carried]
    return tensors


def _settled(column: Column, stage: int, stages: Stages) -> Column:
    """``column`` of tensors at the place that its neighbours tell, where its own content tells none."""
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


def _carried(stages: Stages) -> frozenset[str]:
    """The places of tensors that come into several stages: of their gradient, each hands on a part."""
    times = Counter(one.place for columns in stages.values() for one in columns if one.where == GIVEN)
    return frozenset(place for place, count in times.items() if place and count > 1)


def _flowing(column: Column, of: Mapping[tuple[str, int], Column], carried: frozenset[str]) -> Column:
    """``column`` of gradients at the place of the tensors that they are of."""
    tensor = of.get((_FLOWING.get(column.where, ""), column.number))
    if tensor is None or not tensor.place or tensor.place in carried:
        return column
    here = {place + of_replica for place in (*tensor.own, tensor.place) for of_replica in ("", REPLICA)}
    own = [place for place in column.own if place in here]
    if not own and tensor.place not in column.places.by_place:
        return column
    return replace(column, place=[*own, tensor.place][0], judged=bool(own))


def _missed(columns: Sequence[Column], of: Mapping[tuple[str, int], Column], places: Both) -> Iterator[Column]:
    """A column of nothing for each gradient that the reference has and that no call was seen to have."""
    _, backward = places
    came = {(one.where, one.number) for one in columns}
    for (_, number), tensor in of.items():
        if tensor.where in _FLOWS and tensor.place in backward.by_place:
            where, what = _FLOWS[tensor.where]
            if (where, number) not in came:
                nothing: tuple[Sketch | None, ...] = (None,) * len(tensor.seen)
                name = f"{what} {number}" if number else what
                yield Column(
                    Kind.BACKWARD, where, name, number, nothing, backward, tensor.places, (), tensor.place, False
                )
