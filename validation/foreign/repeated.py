"""A stage that was called as often as it should be, but with one microbatch's tensors in place of another's."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from pipeline.action import Kind
from validation.foreign.step_facts import StepFacts
from validation.judging.cause import Cause, listed
from validation.observers.observed import UNKNOWN_MICROBATCH
from validation.observers.recording import RECEIVED


def repeated(facts: StepFacts) -> list[Cause]:
    """What the first such stage was given, where every stage before it had each microbatch once."""
    if not facts.observed.called(0):
        return []
    before: Sequence[int] = range(facts.microbatches)
    for stage in range(facts.stages):
        order = _called(facts, stage)
        if UNKNOWN_MICROBATCH in order:
            return []  # nobody knows of which microbatch it had another's tensors
        if stage in facts.unseen or sorted(order) == sorted(before):
            before = order or before
            continue
        given = _in_place(order, before)
        if not given or not _by_module(facts, stage):
            return []
        return [_cause(facts, stage, given)]
    return []


def backed_again(facts: StepFacts) -> list[Cause]:
    """A stage that ran backwards through one microbatch twice, with the output gradient of one that it left out."""
    for stage in reversed(range(facts.stages)):
        order = ordered(facts, stage, Kind.BACKWARD)
        missing = {m for m in range(facts.microbatches) if m not in order}
        if UNKNOWN_MICROBATCH in order or len(order) != facts.microbatches or not missing:
            continue
        met = {
            one.really.label.point.microbatch: one.action
            for one in facts.observed.crossings(0)
            if one.action.stage == stage and one.where == RECEIVED and one.really is not None and one.really.label
        }
        found = sorted(missing & met.keys())
        if set(found) != missing or any(order.count(met[m].microbatch) < 2 for m in found):
            return []
        told = ", ".join(f"that of microbatch {m} met the activations of microbatch {met[m].microbatch}" for m in found)
        ran = ", ".join(f"stage {one} {listed(seen)}" for one in (stage + 1, stage)
                        if (seen := ordered(facts, one, Kind.BACKWARD)))  # fmt: skip
        return [
            Cause(
                "mispaired",
                rank=facts.observed.schedule.placement[stage],
                stage=stage,
                microbatches=tuple(found),
                action=str(met[found[0]]),
                detail=f"of the output gradients, {told}; order of backwards: {ran}",
            )
        ]
    return []


def ordered(facts: StepFacts, stage: int, kind: Kind) -> list[int]:
    """The microbatches of a stage's forwards or backwards, as they ran; empty where it was not watched."""
    flow = facts.passed.get(stage)
    return [] if flow is None else [action.microbatch for action in flow.actions if action.kind is kind]


def rearranged(facts: StepFacts) -> bool:
    """Whether some stage was called as often as it should be, for some microbatches twice and for others never.

    Then nothing was left out: tensors were taken for others.
    """
    every = list(range(facts.microbatches))
    called = [action for action, _ in facts.observed.called(0)]
    orders = [[a.microbatch for a in called if a.stage == stage] for stage in range(facts.stages)]
    told = [order for order in orders if UNKNOWN_MICROBATCH not in order]
    return any(len(order) == len(every) and sorted(order) != every for order in told)


def _in_place(order: Sequence[int], before: Sequence[int]) -> dict[int, int]:
    """For each missing microbatch, the one whose tensors came at its position; empty if it was not so."""
    if len(order) != len(before):
        return {}
    missing = [k for k, m in enumerate(before) if m not in order]
    given = {before[k]: order[k] for k in missing}
    spare = Counter(order) - Counter(before)
    return given if Counter(given.values()) == spare else {}


def _by_module(facts: StepFacts, stage: int) -> bool:
    """Whether what ``stage`` did is known from its module's tensors; a trace has numbers of its own."""
    ran = facts.observed.forwards(0)[stage]
    return sorted(ran) == sorted(action.microbatch for action, _ in facts.observed.called(0) if action.stage == stage)


def _cause(facts: StepFacts, stage: int, given: dict[int, int]) -> Cause:
    told = ", ".join(f"microbatch {other}'s, expected microbatch {own}'s" for own, other in sorted(given.items()))
    first = min(given)
    ran = [f"stage {one} {listed(_called(facts, one))}" for one in (stage - 1, stage) if one >= 0]
    found = Cause(
        "mispaired" if stage else "swapped-data",
        rank=facts.observed.schedule.placement[stage],
        stage=stage,
        microbatches=tuple(sorted(given)),
        action=f"{stage}F{first}",
        detail=f"its input is {told} ({stage}F{first}); called with, in this order: {', '.join(ran)}",
    )
    return or_wrong_message(found) if stage else found


def or_wrong_message(cause: Cause) -> Cause:
    """``cause``, or a message that already arrived so: who sees the modules alone does not know which."""
    return replace(cause, instead=(replace(cause, kind="wrong-message", detail="or that is how they arrived"),))


def _called(facts: StepFacts, stage: int) -> list[int]:
    return [action.microbatch for action, _ in facts.observed.called(0) if action.stage == stage]
