"""A stage with the right number of calls, but with a microbatch's tensors in another's place."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from pipeproof.core.cause import Cause, join_numbers
from pipeproof.core.observe.observed import UNKNOWN_MICROBATCH
from pipeproof.core.observe.recording import GIVEN
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.rules.place import or_wrong_message, order_of
from pipeproof.pipeline.action import Kind

_OTHER_TIMES = ("dropped", "doubled")


def find_repeated(evidence: Evidence) -> list[Cause]:
    """Find wrong inputs to the first such stage, if every earlier stage had each microbatch once."""
    if not evidence.passed:
        return []
    before: Sequence[int] = range(evidence.microbatches)
    for stage in range(evidence.stages):
        order = _calls_of(evidence, stage)
        if UNKNOWN_MICROBATCH in order:
            return []  # the microbatch with another's tensors is unknown
        if stage in evidence.unseen or sorted(order) == sorted(before):
            before = order or before
            continue
        given = _in_place(order, before)
        sure = stage == 0 or _by_module(evidence, stage)  # no message gives the first its input
        backwards = order_of(evidence, stage, Kind.BACKWARD)
        if not given or not sure or sorted(backwards) not in ([], sorted(order)):  # a trial has no backward
            return []
        if not _came(evidence, stage, given.values()):
            return []
        return (_whole(evidence, order) if stage == 0 else []) or [_cause(evidence, stage, given)]
    return []


def _whole(evidence: Evidence, order: Sequence[int]) -> list[Cause]:
    """Microbatches that ran with their targets too: gradients show exactly these twice or never."""
    found = evidence.attribution
    if found is None or found.unknown or {cause.kind for cause in found.causes} != {*_OTHER_TIMES}:
        return []
    gone, again = ({m for one in found.causes if one.kind == kind for m in one.microbatches} for kind in _OTHER_TIMES)
    every = Counter(range(evidence.microbatches))
    if (gone, again) != ({*(every - Counter(order))}, {*(Counter(order) - every)}):
        return []
    ran = f"stage 0 was called with, in this order: {join_numbers(order)}"
    return [replace(cause, detail="; ".join(filter(None, (cause.detail, ran)))) for cause in found.causes]


def _in_place(order: Sequence[int], before: Sequence[int]) -> dict[int, int]:
    """Map each missing microbatch to the microbatch in its position; empty without a fit.

    If all came some places late from some position on, and the one before it until then, this covers each from there
    on.
    """
    if len(order) != len(before):
        return {}
    apart = {own: came for own, came in zip(before, order, strict=True) if own != came}
    right = next(k for k, (own, came) in enumerate(zip(before, order, strict=True)) if own != came)
    for late in range(1, len(before)):
        came_late = [before[max(k - late, right - 1)] for k in range(right, len(before))]
        if right and list(order[right:]) == came_late:
            return apart
    missing = [k for k, m in enumerate(before) if m not in order]
    given = {before[k]: order[k] for k in missing}
    spare = Counter(order) - Counter(before)
    return given if Counter(given.values()) == spare else {}


def _by_module(evidence: Evidence, stage: int) -> bool:
    """True if the module's tensors identify calls to ``stage``; a trace numbers them differently."""
    return sorted(evidence.observed.forwards(evidence.number)[stage]) == sorted(_calls_of(evidence, stage))


def _came(evidence: Evidence, stage: int, others: Collection[int]) -> bool:
    """True if the inputs match their assumed microbatches: a few numbers of a tensor may match by chance."""
    here = [one for one in evidence.observed.crossings(evidence.number) if one.action.stage == stage]
    return all(one.same for one in here if one.where == GIVEN and one.action.microbatch in others)


def _cause(evidence: Evidence, stage: int, given: dict[int, int]) -> Cause:
    text = ", ".join(f"of microbatch {other} in place of {own}" for own, other in sorted(given.items()))
    first = next(iter(given))  # in the order of the stage before
    ran = [f"stage {one}: {join_numbers(_calls_of(evidence, one))}" for one in (stage - 1, stage) if one >= 0]
    found = Cause(
        "mispaired" if stage else "swapped-data",
        rank=evidence.placement[stage],
        stage=stage,
        microbatches=tuple(sorted(given)),
        action=f"{stage}F{first}",
        detail=f"its input is that {text} ({stage}F{first}); called with, in this order: {'; '.join(ran)}",
    )
    return or_wrong_message(found) if stage else found


def _calls_of(evidence: Evidence, stage: int) -> list[int]:
    return [action.microbatch for action, _ in evidence.observed.calls(evidence.number) if action.stage == stage]
