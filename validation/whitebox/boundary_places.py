"""Where the tensors at the boundaries of stages pass in the reference, by structure: for a diagnosis alone."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeproof.core.observe.observed import INPUT
from pipeproof.core.observe.recording import GIVEN, HANDED_ON, KEPT, MADE, RECEIVED
from pipeproof.pipeline.action import Kind
from pipeproof.reference.handed_on import Cut
from pipeproof.whitebox.call_matching import Column
from pipeproof.whitebox.survey import REPLICA, Both, handed_on

_FLOWING = {RECEIVED: MADE, HANDED_ON: GIVEN}  # the tensor that a gradient is of
_FLOWS = {MADE: (RECEIVED, "output gradient"), GIVEN: (HANDED_ON, "input gradient")}
Stages = Mapping[int, Sequence[Column]]
Cuts = Mapping[int, Cut]


def place_by_structure(stages: Stages, places: Both, note: Callable[[Cuts], None]) -> dict[int, list[Column]]:
    """The columns of every stage, with places by structure for what has none of its own: for a diagnosis alone.

    A gradient is at its tensor's place even where it is like that of another, and is missed where it never came. Of
    some a stage has a part: ``note`` notes those parts among the places of gradients.
    """
    tensors = {stage: [_settled(one, stage, stages) for one in columns] for stage, columns in stages.items()}
    cuts, divided = _cuts(tensors, places)
    note(cuts)
    flows = {stage: _GradientFlow(stage, columns, places, divided[stage]) for stage, columns in tensors.items()}
    scale = _scale({stage: [flow.settled(one) for one in tensors[stage]] for stage, flow in flows.items()})
    for stage, flow in flows.items():
        settled = [replace(flow, scale=scale).settled(one) for one in tensors[stage]]
        tensors[stage] = [*settled, *flow.missed(settled)]
    return tensors


def _scale(stages: Stages) -> str | None:
    """Whether gradients flow as those of a replica, or as those of all: as the one nearest to the loss tells."""
    for _, columns in sorted(stages.items(), reverse=True):
        for column in sorted(columns, key=lambda one: one.where != RECEIVED):
            told = {REPLICA if place.endswith(REPLICA) else "" for place in column.own}
            if column.where in _FLOWING and column.judged and len(told) == 1:
                return told.pop()
    return None


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
        if column.where == GIVEN:
            yield from _free(stages, stage)
        # What comes into a later stage beside what flows is data of the model's; numbers may also be what flows.
        for other in stages if column.is_whole_numbers else filter(None, stages):
            yield from (place for place in _at(stages, other, GIVEN, number) if place.startswith(INPUT))
    else:
        yield f"{INPUT} {number}"


def _free(stages: Stages, stage: int) -> list[str]:
    """Where the stage before has what it hands on, if that is one place alone which no input of ``stage`` is at."""
    taken = {one.place for one in stages[stage] if one.where == GIVEN}
    made = {one.place for one in stages.get(stage - 1, ()) if one.where == MADE and one.place} - taken
    return list(made) if len(made) == 1 else []


def _at(stages: Stages, stage: int, where: str, number: int) -> Iterator[str]:
    yield from (one.place for one in stages.get(stage, ()) if (one.where, one.number) == (where, number) and one.place)


def _fits(column: Column, place: str) -> bool:
    known = column.places.get(place, {})
    forms = {(one.shape, one.dtype) for one in known.values()}
    return bool(known) and all(one is None or (one.shape, one.dtype) in forms for one in column.observed)


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
    """The gradients of a stage, whose tensors are settled; of ``divided`` places it may have a part alone.

    ``scale``: that of all gradients of the step; None: either.
    """

    stage: int
    columns: Sequence[Column]
    places: Both
    divided: frozenset[str]
    scale: str | None = None

    def settled(self, column: Column) -> Column:
        """``column`` of gradients at the place of the tensors that they are of."""
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

    def missed(self, came: Sequence[Column]) -> Iterator[Column]:
        """A column of nothing for each gradient that the reference has and that no call was observed to have."""
        forward, backward = self.places
        there = {(one.where, one.number) for one in came}
        for tensor in self._of.values():
            where, what = _FLOWS.get(tensor.where, ("", ""))
            place = next(iter(self._places(tensor)), "")
            if where and (where, tensor.number) not in there and place in backward:
                name = f"{what} {tensor.number}" if tensor.number else what
                nothing = (None,) * len(tensor.observed)
                yield Column(
                    Kind.BACKWARD, where, name, tensor.number, nothing, backward, forward, (), place, judged=False
                )

    def _places(self, tensor: Column) -> Sequence[str]:
        """Where the gradient of ``tensor`` passes; nowhere if a part of it passes here, and it is not known which."""
        _, backward = self.places
        if tensor.place not in self.divided:
            return tensor.place, *tensor.own
        part = handed_on(tensor.place, self.stage)
        return (part,) if part in backward else ()

    @property
    def _of(self) -> Mapping[tuple[str, int], Column]:
        """The tensors."""
        return {(one.where, one.number): one for one in self.columns if one.kind is Kind.FORWARD}
