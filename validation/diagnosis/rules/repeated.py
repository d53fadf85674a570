"""A stage that was called as often as it should be, but with one microbatch's tensors in place of another's."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from pipeproof.core.cause import Cause, listed
from pipeproof.diagnosis.evidence import Evidence
from pipeproof.observers.observed import UNKNOWN_MICROBATCH
from pipeproof.observers.recording import GIVEN, RECEIVED
from pipeproof.pipeline.action import Action, Kind

_OTHER_TIMES = ("dropped", "doubled")


def repeated(evidence: Evidence) -> list[Cause]:
    """What the first such stage was given, where every stage before it had each microbatch once."""
    if not evidence.passed:
        return []
    before: Sequence[int] = range(evidence.microbatches)
    for stage in range(evidence.stages):
        order = _called(evidence, stage)
        if UNKNOWN_MICROBATCH in order:
            return []  # nobody knows of which microbatch it had another's tensors
        if stage in evidence.unseen or sorted(order) == sorted(before):
            before = order or before
            continue
        given = _in_place(order, before)
        told = stage == 0 or _by_module(evidence, stage)  # what the first is given nobody sends
        if not given or not told or _has_trial(evidence, stage) or not _came(evidence, stage, given.values()):
            return []
        return (_whole(evidence, order) if stage == 0 else []) or [_cause(evidence, stage, given)]
    return []


def _whole(evidence: Evidence, order: Sequence[int]) -> list[Cause]:
    """Microbatches that ran with their own targets too: as gradients say, these and no others came twice or never."""
    found = evidence.attribution
    if found is None or found.unknown or {cause.kind for cause in found.causes} != {*_OTHER_TIMES}:
        return []
    gone, again = ({m for one in found.causes if one.kind == kind for m in one.microbatches} for kind in _OTHER_TIMES)
    every = Counter(range(evidence.microbatches))
    if (gone, again) != ({*(every - Counter(order))}, {*(Counter(order) - every)}):
        return []
    ran = f"stage 0 was called with, in this order: {listed(order)}"
    return [replace(cause, detail="; ".join(filter(None, (cause.detail, ran)))) for cause in found.causes]


def backed_again(evidence: Evidence) -> list[Cause]:
    """A stage that ran backwards through one microbatch twice, with the output gradient of one that it left out."""
    for stage in reversed(range(evidence.stages)):
        order = ordered(evidence, stage, Kind.BACKWARD)
        missing = {m for m in range(evidence.microbatches) if m not in order}
        if UNKNOWN_MICROBATCH in order or len(order) != evidence.microbatches or not missing:
            continue
        met = {
            one.really.label.point.microbatch: one.action
            for one in evidence.observed.crossings(evidence.number)
            if one.action.stage == stage and one.where == RECEIVED and one.really is not None and one.really.label
        }
        found = sorted(missing & met.keys())
        if set(found) != missing or any(order.count(met[m].microbatch) < 2 for m in found):
            return []
        told = ", ".join(f"that of microbatch {m} met the activations of microbatch {met[m].microbatch}" for m in found)
        ran = "; ".join(f"stage {one}: {listed(seen)}" for one in (stage + 1, stage)
                        if (seen := ordered(evidence, one, Kind.BACKWARD)))  # fmt: skip
        return [
            Cause(
                "mispaired",
                rank=evidence.placement[stage],
                stage=stage,
                microbatches=tuple(found),
                action=str(min((met[m] for m in found), key=lambda one: turn_of(evidence, one))),
                detail=f"of the output gradients, {told}; order of backwards: {ran}",
            )
        ]
    return []


def ordered(evidence: Evidence, stage: int, kind: Kind) -> list[int]:
    """The microbatches of a stage's forwards or backwards, as they ran; empty where it was not watched."""
    flow = evidence.passed.get(stage)
    return [] if flow is None else [action.microbatch for action in flow.actions if action.kind is kind]


def turn_of(evidence: Evidence, action: Action) -> int:
    """How many actions of its kind its stage ran before ``action``."""
    order = ordered(evidence, action.stage, action.kind)
    return order.index(action.microbatch) if action.microbatch in order else len(order)


def rearranged(evidence: Evidence) -> bool:
    """Whether some stage was called as often as it should be, for some microbatches twice and for others never.

    Then nothing was left out: tensors were taken for others.
    """
    if not evidence.passed:
        return False
    every = list(range(evidence.microbatches))
    called = [action for action, _ in evidence.observed.called(evidence.number)]
    stages = [stage for stage in range(evidence.stages) if not _has_trial(evidence, stage)]
    orders = [[a.microbatch for a in called if a.stage == stage] for stage in stages]
    told = [order for order in orders if UNKNOWN_MICROBATCH not in order]
    return any(len(order) == len(every) and sorted(order) != every for order in told)


def _has_trial(evidence: Evidence, stage: int) -> bool:
    """Whether no backward ran through some call of a stage, as through a trial of shapes."""
    ran = ordered(evidence, stage, Kind.BACKWARD)
    return bool(ran) and sorted(ran) != sorted(_called(evidence, stage))


def _in_place(order: Sequence[int], before: Sequence[int]) -> dict[int, int]:
    """For each missing microbatch, the one whose tensors came at its position; empty if it was not so.

    Where from some position on all came some places late, and the one before it until then, that is each from there on.
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
    """Whether what ``stage`` did is known from its module's tensors; a trace has numbers of its own."""
    return sorted(evidence.observed.forwards(evidence.number)[stage]) == sorted(_called(evidence, stage))


def _came(evidence: Evidence, stage: int, others: Collection[int]) -> bool:
    """Whether what came in is what it is taken for: a few numbers of a tensor may look like another's by chance."""
    here = [one for one in evidence.observed.crossings(evidence.number) if one.action.stage == stage]
    return all(one.same for one in here if one.where == GIVEN and one.action.microbatch in others)


def _cause(evidence: Evidence, stage: int, given: dict[int, int]) -> Cause:
    told = ", ".join(f"of microbatch {other} in place of {own}" for own, other in sorted(given.items()))
    first = next(iter(given))  # in the order of the stage before
    ran = [f"stage {one}: {listed(_called(evidence, one))}" for one in (stage - 1, stage) if one >= 0]
    found = Cause(
        "mispaired" if stage else "swapped-data",
        rank=evidence.placement[stage],
        stage=stage,
        microbatches=tuple(sorted(given)),
        action=f"{stage}F{first}",
        detail=f"its input is that {told} ({stage}F{first}); called with, in this order: {'; '.join(ran)}",
    )
    return or_wrong_message(found) if stage else found


def or_wrong_message(cause: Cause) -> Cause:
    """``cause``, or a message that already arrived so: who sees the modules alone does not know which."""
    return replace(cause, instead=(replace(cause, kind="wrong-message", detail="or that is how they arrived"),))


def or_zeros(cause: Cause, *, forward: bool) -> Cause:
    """``cause`` of what came in as zeros, or that it was zero when it was sent: nobody watches what is sent."""
    if forward:
        other = replace(cause, kind="wrong-message", detail="or zeros are what was sent")
    else:
        other = replace(cause, kind="dropped", detail="or zeros are what was handed back, as where a graph was cut")
    return replace(cause, instead=(other,))


def _called(evidence: Evidence, stage: int) -> list[int]:
    return [action.microbatch for action, _ in evidence.observed.called(evidence.number) if action.stage == stage]
