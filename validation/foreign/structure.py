"""Where a tensor at a boundary should pass, told by its neighbours where its content tells none or another place."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from pipeline.action import Kind
from validation.foreign.call_matching import Column
from validation.foreign.places import INPUT, REPLICA, Both
from validation.observers.recording import GIVEN, HANDED_ON, KEPT, MADE, RECEIVED
from validation.observers.sketch import Sketch

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
