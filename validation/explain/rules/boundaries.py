"""From divergences to causes: the place and likeness of a wrong tensor determine its fault."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

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
    Point,
)
from pipeproof.core.tolerance import scalar_error
from pipeproof.explain.divergence import Divergence
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.limits import ALIKE, LEFT
from pipeproof.explain.replay import replay
from pipeproof.explain.rules.place import or_zeros
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


Refine = Callable[[Divergence], tuple[str, str] | None]  # a kind of cause and its words, where more is known


def boundaries(evidence: Evidence) -> list[Cause]:
    """Name the first divergence's cause, then independent causes."""
    proved = partial(evidence.once, replay)
    return causes_of(
        evidence.divergences,
        evidence.microbatches,
        refine=lambda one: _refine(one, evidence, proved),
        room=max(ALIKE, whole_within(evidence.setup.dtype)),
    )


def causes_of(found: Sequence[Divergence], microbatches: int, *, refine: Refine, room: float = ALIKE) -> list[Cause]:
    """Name causes for divergences in flow order.

    ``room``: how far apart, relative to their size, two measurements of one factor may be.
    """
    groups: dict[tuple[str, int, str], list[tuple[Divergence, str]]] = {}
    for one in found:
        kind, text = _kind(one, refine)
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


def _kind(one: Divergence, refine: Refine) -> tuple[str, str]:
    where, what = one.point.where, one.what
    if one.graph is not None:
        return "swapped-activations", what.text
    if where in (KEPT, LATE):
        return "overwritten", what.text
    if what.part is None and what.kind in _ANYWHERE:
        return what.kind, what.text
    if what.part is None and what.label is not None and what.label.ago and what.kind == "other":
        return "stale-tensor", what.text
    if what.kind == "multiple" and what.factor is not None and what.part is None and where in _GRADIENTS:
        return ("sign" if abs(what.factor + 1) < LEFT else "scale"), what.text
    if what.kind == "other" and what.part is None and _is_beside(one) and where != MADE:
        return "wrong-message", what.text
    if what.kind == "sum" and what.part is None and where in _GRADIENTS and where != LOSS:
        return "extra-term", what.text
    if what.kind == "other" and what.part is None and one.point.stage == 0 and where in (GIVEN, USED):
        return "swapped-data", what.text
    if what.part is not None and what.part.is_run and where not in (MADE, HANDED_ON):
        # To the end, or with another's content: a buffer. A few elements in the middle: something on the way.
        return ("overwritten" if what.label is not None or what.part.is_tail else "altered"), what.text
    refined = refine(one)
    if refined is not None:
        return refined
    other, zero, rest = _THERE[where]
    kind = "different" if what.part is not None or (what.kind == "other" and _is_beside(one)) else what.kind
    return {"other": other, "zero": zero}.get(kind, rest), what.text


def _is_beside(one: Divergence) -> bool:
    """True for a different tensor across the same boundary."""
    return one.what.label is not None and one.what.label.point == one.point and not one.what.label.ago


def _refine(one: Divergence, evidence: Evidence, proved: Callable[[], Sequence[Cause]]) -> tuple[str, str] | None:
    """Identify a fault of the last stage or a module with right inputs; ``proved``: the fault that explains all."""
    point, number = one.point, evidence.diverged
    observed = _observed(evidence, point)
    if observed is None:
        return None
    if point.where == MADE and (found := [one for one in proved() if one.stage == point.stage]):
        return found[0].kind, found[0].detail
    if point.where == LOSS:
        other = _other_target(evidence, point.microbatch, float(observed))
        return ("swapped-data", other) if other else None
    if point.where in (MADE, HANDED_ON) and evidence.beside is not None and evidence.beside.draws:
        return "randomness", f"{one.what.text}; the model draws random numbers, and others may have given this"
    if point.where in (GIVEN, USED) and not point.stage and _is_cut_otherwise(evidence, number, point.where):
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


def _is_cut_otherwise(evidence: Evidence, number: int, where: str) -> bool:
    """True if all microbatches' inputs together are the right data."""
    observed, expected = [], []
    for m, one in enumerate(evidence.played[number].boundaries):
        tensor = _observed(evidence, Point(0, m, where))
        if tensor is None:
            return False
        observed.append(tensor.flatten())
        expected.append(one.inputs[0][0].flatten())
    if all(map(torch.equal, observed, expected)):
        return False
    return torch.equal(torch.cat(observed).sort().values, torch.cat(expected).sort().values)


def _cause(kind: str, group: Sequence[tuple[Divergence, str]], count: int, *, room: float) -> Cause:
    first = min((one for one, _ in group), key=lambda one: one.turn)
    microbatches = tuple(sorted({one.point.microbatch for one, _ in group} - {UNKNOWN_MICROBATCH}))
    every = len(microbatches) == count
    factors = [one.what.factor or 0.0 for one, _ in group]
    detail = _describe_group(group, every=every)
    if kind == "scale" and max(factors) - min(factors) > room * max(map(abs, factors)):
        kind, detail = _weights(group)
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
    came = first.point.where == RECEIVED or (first.point.where == GIVEN and first.point.stage > 0)
    if kind != "uninitialised" or not came or any(one.what.kind != "zero" for one, _ in group):
        return cause
    return or_zeros(cause, forward=first.point.where == GIVEN)


def _describe_group(group: Sequence[tuple[Divergence, str]], *, every: bool) -> str:
    """Describe a group's tensors: all alike, each another microbatch's, or one by one."""
    where = group[0][0].point.where
    texts = {text for _, text in group}
    owners = [_owner(one) for one, _ in group]
    if len(texts) == 1:
        return f"{where} {'of every microbatch ' * (every and len(group) > 1)}is {group[0][1]}"
    if None not in owners and len({one.what.which for one, _ in group}) == 1:
        own = join_numbers(one.point.microbatch for one, _ in group)
        which = f" ({group[0][0].what.which})" if group[0][0].what.which else ""
        return f"{where} of microbatches {own} is that of {', '.join(map(str, owners))}{which}"
    whose = [_whose(one) for one, _ in group]
    parts = [f"{where} {of} is {text}" for of, (_, text) in zip(whose, group, strict=True)]
    if all(one.what.kind == "different" and one.what.error is not None for one, _ in group):
        rest = [one.point.microbatch for one, _ in group[1:]]
        return f"{parts[0]}; that of microbatch{'es' * (len(rest) > 1)} {join_numbers(rest)} is no microbatch's either"
    return first_few(parts, "; ")


def _whose(one: Divergence) -> str:
    """Name the microbatch, or the call of an unknown microbatch."""
    known = one.point.microbatch != UNKNOWN_MICROBATCH
    return f"of microbatch {one.point.microbatch}" if known else f"in {one.action}"


def _owner(one: Divergence) -> int | None:
    """Return the microbatch whose tensor stood here."""
    label = one.what.label
    if (
        one.what.kind != "other"
        or one.what.part is not None
        or label is None
        or label.ago
        or label.point[::2] != one.point[::2]
    ):
        return None
    return label.point.microbatch


def _weights(group: Sequence[tuple[Divergence, str]]) -> tuple[str, str]:
    """Describe factors that differ between microbatches, as in weighting by targets."""
    factors = {one.point.microbatch: one.what.factor or 0.0 for one, _ in group}
    text = ", ".join(f"{factor:.4g} of microbatch {m}" for m, factor in sorted(factors.items()))
    return "unequal-weights", f"{group[0][0].point.where}: {text}"


def _observed(evidence: Evidence, point: Point) -> Tensor | None:
    tensors = _all(evidence, point)
    return tensors[0] if tensors else None


def _all(evidence: Evidence, point: Point) -> Sequence[Tensor | None]:
    recording = evidence.recording_of(evidence.diverged)
    return recording.tensors.get(point, ()) if recording is not None else ()
