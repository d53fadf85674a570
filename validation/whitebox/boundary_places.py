"""Locate boundary tensors in the reference by structure: for diagnosis alone."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeproof.core.observe.observed import INPUT
from pipeproof.core.observe.recording import GIVEN, HANDED_ON, KEPT, MADE, RECEIVED
from pipeproof.pipeline.action import Kind
from pipeproof.reference.handed_on import Cut
from pipeproof.whitebox.call_matching import Column
from pipeproof.whitebox.tensor_index import REPLICA, Both, flow_place

_FLOWING = {RECEIVED: MADE, HANDED_ON: GIVEN}  # from a gradient's point to its tensor's
_FLOWS = {MADE: (RECEIVED, "output gradient"), GIVEN: (HANDED_ON, "input gradient")}
Stages = Mapping[int, Sequence[Column]]
Cuts = Mapping[int, Cut]


def place_by_structure(stages: Stages, places: Both, note: Callable[[Cuts], None]) -> dict[int, list[Column]]:
    """Return each stage's columns, placing unplaced ones by structure: for diagnosis alone.

    A gradient takes its tensor's place even if it resembles another, and a missing one is noticed. ``note`` records
    partial gradients among gradient places.
    """
    tensors = {stage: [_settle(one, stage, stages) for one in columns] for stage, columns in stages.items()}
    cuts, divided = _cuts(tensors, places)
    note(cuts)
    flows = {stage: _GradientFlow(stage, columns, places, divided[stage]) for stage, columns in tensors.items()}
    either = {stage: [flow.settle(one) for one in tensors[stage]] for stage, flow in flows.items()}
    gradients = [
        column
        for _, columns in sorted(either.items(), reverse=True)
        for column in sorted(columns, key=lambda one: one.where != RECEIVED)
        if column.where in _FLOWING and column.judged
    ]
    scales = [{REPLICA if place.endswith(REPLICA) else "" for place in column.own} for column in gradients]
    scale = next((one.pop() for one in scales if len(one) == 1), None)  # per replica or total: nearest to the loss
    for stage, flow in flows.items():
        settled = [replace(flow, scale=scale).settle(one) for one in tensors[stage]]
        tensors[stage] = [*settled, *flow.missing_columns(settled)]
    return tensors


def _settle(column: Column, stage: int, stages: Stages) -> Column:
    """Place a tensor column by its neighbours, if its own content does not.

    Also applies if a neighbouring input has the same content, and the previous stage hands on two tensors.
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
    """Yield places of the tensor's products, its sources, and equally numbered tensors in other stages."""
    number = column.number
    if column.where == MADE:
        yield from _at(stages, stage + 1, GIVEN, number)
        return
    if column.where == KEPT:
        yield from _at(stages, stage, GIVEN, number)
    if stage:
        yield from _at(stages, stage - 1, MADE, number)
        if column.where == GIVEN:  # the previous stage's single output place, if no input of this one uses it
            taken = {one.place for one in stages[stage] if one.where == GIVEN}
            free = {one.place for one in stages.get(stage - 1, ()) if one.where == MADE and one.place} - taken
            yield from free if len(free) == 1 else ()
        # Besides flowing tensors, a later stage receives model data; integers, which have no gradient, may be either.
        whole_numbers = not any(one is not None and one.dtype.is_floating_point for one in column.observed)
        for other in stages if whole_numbers else filter(None, stages):
            yield from (place for place in _at(stages, other, GIVEN, number) if place.startswith(INPUT))
    else:
        yield f"{INPUT} {number}"


def _at(stages: Stages, stage: int, where: str, number: int) -> Iterator[str]:
    yield from (one.place for one in stages.get(stage, ()) if (one.where, one.number) == (where, number) and one.place)


def _fits(column: Column, place: str) -> bool:
    known = column.places.get(place, {})
    forms = {(one.shape, one.dtype) for one in known.values()}
    return bool(known) and all(one is None or (one.shape, one.dtype) in forms for one in column.observed)


def _cuts(stages: Stages, places: Both) -> tuple[Cuts, Mapping[int, frozenset[str]]]:
    """Return places whose gradients may be partial per stage, and stages known to split them.

    Such a tensor enters several stages, or enters beside another tensor possibly made from it.
    """
    _, backward = places
    at = {
        (stage, where): [one.place for one in columns if one.where == where]
        for stage, columns in stages.items()
        for where in (GIVEN, MADE)
    }
    flowing = {stage: [place for place in at[stage, GIVEN] if place in backward] for stage in stages}
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
class _GradientFlow:
    """A stage's gradients, with settled tensors; at ``divided`` places they may be partial.

    scale: the step's gradient scale; None: either.
    """

    stage: int
    columns: Sequence[Column]
    places: Both
    divided: frozenset[str]
    scale: str | None = None

    def settle(self, column: Column) -> Column:
        """Place a gradient column at its tensor's place."""
        tensor = self._of.get((_FLOWING.get(column.where, ""), column.number))
        if tensor is None or not tensor.place:
            return column
        places = self._places(tensor)
        scales = ("", REPLICA) if self.scale is None else (self.scale,)
        here = {place + scale for place in places for scale in scales}
        own = [place for place in column.places.usual(column.observed) if place in here]
        if not own and not (places and places[0] in column.places):
            return column
        expected = [place + scales[0] for place in places if place + scales[0] in column.places]
        return replace(column, own=tuple(own) or column.own, place=[*own, *expected, *places][0], judged=bool(own))

    def missing_columns(self, came: Sequence[Column]) -> Iterator[Column]:
        """Yield an empty column for each reference gradient without an observation."""
        forward, backward = self.places
        there = {(one.where, one.number) for one in came}
        for tensor in self._of.values():
            where, what = _FLOWS.get(tensor.where, ("", ""))
            place = next(iter(self._places(tensor)), "")
            if where and (where, tensor.number) not in there and place in backward:
                name = f"{what} {tensor.number}" if tensor.number else what
                nothing = (None,) * len(tensor.observed)
                yield Column(Kind.BACKWARD, where, name, tensor.number, nothing, backward, forward, place=place)

    def _places(self, tensor: Column) -> Sequence[str]:
        """Return the gradient's places for ``tensor``; none for an unknown part."""
        _, backward = self.places
        if tensor.place not in self.divided:
            return tensor.place, *tensor.own
        part = flow_place(tensor.place, self.stage)
        return (part,) if part in backward else ()

    @property
    def _of(self) -> Mapping[tuple[str, int], Column]:
        """Tensor columns by point and number."""
        return {(one.where, one.number): one for one in self.columns if one.kind is Kind.FORWARD}
