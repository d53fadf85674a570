"""Locate boundary tensors in the reference by structure: for diagnosis alone."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from pipeproof.core.observe.observed import INPUT
from pipeproof.core.observe.recording import GIVEN, HANDED_ON, KEPT, MADE, RECEIVED
from pipeproof.reference.handed_on import Cut
from pipeproof.whitebox.call_matching import Column, columns_at
from pipeproof.whitebox.tensor_index import REPLICA, Both, Places, flow_place

_GRADIENT_OF = {MADE: RECEIVED, GIVEN: HANDED_ON}  # from a tensor's point to its gradient's
Stages = Mapping[int, Sequence[Column]]
Cuts = Mapping[int, Cut]
Gradients = Mapping[tuple[str, int], Sequence[str]]  # a stage's: their places in the reference, by point and number


def place_by_structure(stages: Stages, places: Both, note: Callable[[Cuts], None]) -> dict[int, list[Column]]:
    """Return each stage's columns, placing unplaced ones by structure: for diagnosis alone.

    A gradient takes its tensor's place even if it resembles another, and a missing one is noticed. ``note`` records
    partial gradients among gradient places.
    """
    _, backward = places
    tensors = {stage: [_settle(one, stage, stages) for one in columns] for stage, columns in stages.items()}
    cuts, divided = _cuts(tensors, backward)
    note(cuts)
    gradients = {stage: _gradients(stage, columns, divided[stage], backward) for stage, columns in tensors.items()}
    scales: Sequence[str] = ("", REPLICA)
    for stage, columns in sorted(tensors.items(), reverse=True):  # all have one scale: the loss's neighbours show it
        for column in sorted(columns, key=lambda one: one.where != RECEIVED):
            settled = _settle_gradient(column, gradients[stage], ("", REPLICA))
            found = {REPLICA if place.endswith(REPLICA) else "" for place in settled.own}
            if len(found) == 1 and len(scales) > 1 and settled.judged and column.where in _GRADIENT_OF.values():
                scales = (found.pop(),)
    made = dict[int, list[Column]]()
    for stage, columns in tensors.items():
        made[stage] = [_settle_gradient(one, gradients[stage], scales) for one in columns]
        there = {(one.where, one.number) for one in columns}
        for (where, number), expected in gradients[stage].items():
            if (where, number) not in there and expected and expected[0] in backward:  # the reference has one
                nothing = columns_at(where, [], places, [number])
                empty = (None,) * len(columns[0].observed)
                made[stage] += [replace(one, observed=empty, place=expected[0]) for one in nothing]
    return made


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


def _cuts(stages: Stages, backward: Places) -> tuple[Cuts, Mapping[int, frozenset[str]]]:
    """Return places whose gradients may be partial per stage, and stages known to split them.

    Such a tensor enters several stages, or enters beside another tensor possibly made from it.
    """
    flowing = {
        stage: [one.place for one in columns if one.where == GIVEN and one.place in backward]
        for stage, columns in stages.items()
    }
    times = Counter(place for given in flowing.values() for place in given)
    cuts, divided = dict[int, Cut](), dict[int, frozenset[str]]()
    for stage, given in flowing.items():
        divided[stage] = frozenset(given if len(given) > 1 else (place for place in given if times[place] > 1))
        ends = [one.place for one in stages[stage] if one.where == MADE]
        if divided[stage] and all(ends) and len(set(given)) == len(given):
            cuts[stage] = Cut(frozenset(given), frozenset(ends))
    return cuts, divided


def _gradients(stage: int, columns: Sequence[Column], divided: frozenset[str], backward: Places) -> Gradients:
    """Return the places of a stage's gradients; at ``divided`` places the stage has a part, or none if unknown."""
    found = dict[tuple[str, int], Sequence[str]]()
    for one in columns:
        if one.where in _GRADIENT_OF and one.place:
            part = flow_place(one.place, stage)
            own = (part,) if part in backward else ()
            found[_GRADIENT_OF[one.where], one.number] = own if one.place in divided else (one.place, *one.own)
    return found


def _settle_gradient(column: Column, gradients: Gradients, scales: Sequence[str]) -> Column:
    """Place a gradient column at its tensor's place, in one of these ``scales``."""
    places = gradients.get((column.where, column.number), ())
    here = {place + scale for place in places for scale in scales}
    own = [place for place in column.places.usual(column.observed) if place in here] if places else []
    if not own and not (places and places[0] in column.places):
        return column
    expected = [place + scales[0] for place in places if place + scales[0] in column.places]
    return replace(column, own=tuple(own) or column.own, place=[*own, *expected, *places][0], judged=bool(own))
