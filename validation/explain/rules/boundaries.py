"""From divergences to causes: the place and likeness of a wrong tensor determine its fault."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch

from pipeproof.core.cause import Cause, join_numbers
from pipeproof.core.limits import FP32
from pipeproof.core.observe.observed import UNKNOWN_MICROBATCH
from pipeproof.core.observe.recording import (
    FLOWED,
    GIVEN,
    HANDED_ON,
    KEPT,
    LATE,
    LOSS,
    MADE,
    OUTPUT,
    RECEIVED,
    USED,
)
from pipeproof.core.tolerance import scalar_error
from pipeproof.explain.divergence import Divergence
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.limits import ALIKE, LEFT
from pipeproof.explain.replay import replay
from pipeproof.explain.rules.places import or_zeros
from pipeproof.explain.solver import whole_within
from pipeproof.pipeline.sizes import first_few

# The likeness alone names these faults, at any place ...
_ANYWHERE = frozenset({"rounded", "not-finite"})
# ... others depend on the place: the kind of cause for "other" (another's tensor), "zero", and anything else.
_THERE: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        GIVEN: ("wrong-message", "uninitialised", "altered"),
        USED: ("wrong-message", "altered", "altered"),  # the tensor was there: the given one is right
        MADE: ("computation", "computation", "computation"),
        OUTPUT: ("wrong-message", "altered", "altered"),
        LOSS: ("computation", "computation", "computation"),
        RECEIVED: ("wrong-message", "uninitialised", "altered"),
        KEPT: ("overwritten", "overwritten", "overwritten"),
        LATE: ("overwritten", "overwritten", "overwritten"),
        # A module's graph receives the message, and gradients of anything else derived from its output.
        FLOWED: ("swapped-gradients", "zero", "extra-term"),
        HANDED_ON: ("swapped-gradients", "zero", "computation"),
    }
)
_GRADIENTS = (RECEIVED, FLOWED, HANDED_ON, LOSS)


def boundaries(evidence: Evidence) -> list[Cause]:
    """Name the first divergence's cause, then independent causes."""
    proved = partial(evidence.once, replay)
    room = max(ALIKE, whole_within(evidence.setup.dtype))
    count = evidence.microbatches
    return causes_of(evidence.divergences, count, refine=lambda one: _refine(one, evidence, proved), room=room)


def causes_of(
    found: Sequence[Divergence],
    microbatches: int,
    *,
    refine: Callable[[Divergence], tuple[str, str] | None],
    room: float = ALIKE,
) -> list[Cause]:
    """Name causes for divergences in flow order; ``refine``: a kind of cause and its words, where more is known.

    ``room``: how far apart, relative to their size, two measurements of one factor may be.
    """
    groups: dict[tuple[str, int, str], list[tuple[Divergence, str]]] = {}
    for one in found:
        kind = _kind(one)
        kind, text = (kind, one.what.text) if kind else refine(one) or (_kind_there(one), one.what.text)
        groups.setdefault((kind, one.point.stage, one.point.where), []).append((one, text))
    causes: dict[tuple[str, str], list[Cause]] = {}  # the same may have happened at further stages, from right inputs
    for (kind, _, where), group in groups.items():
        causes.setdefault((kind, where), []).append(_cause(kind, group, microbatches, room=room))
    return [_together(each) for each in causes.values()]


def _together(each: Sequence[Cause]) -> Cause:
    """Merge a fault at several stages, in the first stage's words."""
    first, *others = each
    stages = tuple(sorted({one.stage for one in each if one.stage is not None}))
    if not others or not stages:
        return first
    every = not all(one.microbatches for one in each)  # where that is said by naming none
    some = () if every else tuple(sorted({m for one in each for m in one.microbatches}))
    rank = first.rank if len({one.rank for one in each}) == 1 else None
    more = join_numbers(sorted(stage for stage in stages if stage != first.stage))
    detail = f"at stage {first.stage}: {first.detail}; and so at stage{'s' * (len(others) > 1)} {more}"
    return replace(first, rank=rank, stages=stages, microbatches=some, detail=detail)


def _kind(one: Divergence) -> str:
    """The kind that place and likeness tell; empty if more may be known."""
    where, what = one.point.where, one.what
    part, label, other = what.part, what.label, what.kind == "other"
    if one.graph is not None:
        return "swapped-activations"
    if where in (KEPT, LATE):
        return "overwritten"
    if part is not None:
        if not part.is_run or where in (MADE, HANDED_ON):
            return ""
        # To the end, or with another's content: a buffer. A few elements in the middle: something on the way.
        return "overwritten" if label is not None or part.is_tail else "altered"
    if what.kind in _ANYWHERE:
        return what.kind
    if other and label is not None and label.ago:
        return "stale-tensor"
    if what.kind == "multiple" and what.factor is not None and where in _GRADIENTS:
        return "sign" if abs(what.factor + 1) < LEFT else "scale"
    if other and where != MADE and _is_beside(one):
        return "wrong-message"
    if what.kind == "sum" and where in _GRADIENTS and where != LOSS:
        return "extra-term"
    return "swapped-data" if other and one.point.stage == 0 and where in (GIVEN, USED) else ""


def _kind_there(one: Divergence) -> str:
    """The kind of a wrong tensor of which no more is known."""
    other, zero, rest = _THERE[one.point.where]
    different = one.what.part is not None or (one.what.kind == "other" and _is_beside(one))
    return rest if different else {"other": other, "zero": zero}.get(one.what.kind, rest)


def _is_beside(one: Divergence) -> bool:
    """True for a different tensor across the same boundary."""
    return one.what.label is not None and one.what.label.point == one.point and not one.what.label.ago


def _refine(one: Divergence, evidence: Evidence, proved: Callable[[], Sequence[Cause]]) -> tuple[str, str] | None:
    """Identify a fault of the last stage or a module with right inputs; ``proved``: the fault that explains all."""
    point, number = one.point, evidence.diverged
    recording = evidence.recording_of(number)
    tensors = {} if recording is None else recording.tensors
    observed = next(iter(tensors.get(point, ())), None)
    if observed is None:
        return None
    if point.where == MADE and (found := [one for one in proved() if one.stage == point.stage]):
        return found[0].kind, found[0].detail
    if point.where == LOSS:
        other = _other_target(evidence, point.microbatch, float(observed))
        return ("swapped-data", other) if other else None
    if point.where in (MADE, HANDED_ON) and evidence.beside is not None and evidence.beside.draws:
        return "randomness", f"{one.what.text}; the model draws random numbers, and others may have given this"
    if point.where in (GIVEN, USED) and not point.stage:
        first = [at for at in evidence.played[number].tensors if (at.stage, at.where) == (0, GIVEN)]
        every = [next(iter(tensors.get(at._replace(where=point.where), ())), None) for at in first]
        given = [tensor.flatten() for tensor in every if tensor is not None]
        own = [evidence.played[number].tensors[at][0] for at in first]
        right = [tensor.flatten() for tensor in own if tensor is not None]
        apart = len(given) == len(right) and not all(map(torch.equal, given, right))
        if apart and torch.equal(torch.cat(given).sort().values, torch.cat(right).sort().values):
            return "swapped-data", "other parts of the same data: the batch was cut into microbatches in another way"
    return None


def _other_target(evidence: Evidence, microbatch: int, observed: float) -> str | None:
    """Find a microbatch whose targets give this loss with another's output, also in earlier steps."""
    assert evidence.beside is not None, "what was recorded can be played"
    for number in range(evidence.number, -1, -1):
        when = " of an earlier step" if number != evidence.number else ""
        for other, batch in enumerate(evidence.setup.batches(number)):
            loss = evidence.beside.loss_with(microbatch, batch.target)
            if (other, number) != (microbatch, evidence.number) and loss and scalar_error(observed, loss) < FP32.least:
                return f"that of microbatch {other}'s targets{when}, expected microbatch {microbatch}'s"
    return None


def _cause(kind: str, group: Sequence[tuple[Divergence, str]], count: int, *, room: float) -> Cause:
    first = min((one for one, _ in group), key=lambda one: one.turn)
    known = [one for one, _ in group if one.point.microbatch != UNKNOWN_MICROBATCH]
    microbatches = tuple(sorted({one.point.microbatch for one in known}))
    every = len(microbatches) == count
    where, texts = first.point.where, {text for _, text in group}
    factors = [(one.point.microbatch, one.what.factor or 0.0) for one, _ in group]
    sizes = [factor for _, factor in factors]
    owners = [_owner(one) for one, _ in group]
    rest = [one.point.microbatch for one, _ in group[1:]]
    if kind == "scale" and max(sizes) - min(sizes) > room * max(map(abs, sizes)):
        kind = "unequal-weights"  # as in weighting by targets
        detail = f"{where}: {', '.join(f'{factor:.4g} of microbatch {m}' for m, factor in sorted(factors))}"
    elif len(texts) == 1:
        detail = f"{where} {'of every microbatch ' * (every and len(group) > 1)}is {group[0][1]}"
    elif None not in owners and len({one.what.which for one, _ in group}) == 1:
        own = join_numbers(one.point.microbatch for one, _ in group)
        which = f" ({group[0][0].what.which})" if group[0][0].what.which else ""
        detail = f"{where} of microbatches {own} is that of {', '.join(map(str, owners))}{which}"
    else:
        places = [f"of microbatch {one.point.microbatch}" if one in known else f"in {one.action}" for one, _ in group]
        parts = [f"{where} {of} is {text}" for of, (_, text) in zip(places, group, strict=True)]
        detail = first_few(parts, "; ")
        if all(one.what.kind == "different" and one.what.error is not None for one, _ in group):
            others = f"that of microbatch{'es' * (len(rest) > 1)} {join_numbers(rest)}"
            detail = f"{parts[0]}; {others} is no microbatch's either"
    slot = f", slot {first.slot}" if first.slot is not None else ""
    cause = Cause(
        kind,
        rank=first.rank,
        stage=first.point.stage,
        microbatches=() if every and kind in ("scale", "sign") else microbatches,
        action=first.action,
        factor=first.what.factor,
        detail=f"{detail} ({first.action}{slot})",
    )
    came = where == RECEIVED or (where == GIVEN and first.point.stage > 0)
    if kind != "uninitialised" or not came or any(one.what.kind != "zero" for one, _ in group):
        return cause
    return or_zeros(cause, forward=where == GIVEN)


def _owner(one: Divergence) -> int | None:
    """Return the microbatch whose tensor stood here."""
    what, label = one.what, one.what.label
    if what.kind != "other" or what.part is not None or label is None or label.ago:
        return None
    return label.point.microbatch if label.point[::2] == one.point[::2] else None
