"""A stage that was called as often as it should be, but with one microbatch's tensors in place of another's."""

from collections import Counter
from collections.abc import Sequence

from validation.foreign.step_facts import StepFacts
from validation.judging.cause import Cause
from validation.observers.observed import UNTOLD


def repeated(facts: StepFacts) -> list[Cause]:
    """What the first such stage was given, where every stage before it had each microbatch once."""
    if not facts.observed.called(0):
        return []
    before: Sequence[int] = range(facts.microbatches)
    for stage in range(facts.stages):
        order = [action.microbatch for action, _ in facts.observed.called(0) if action.stage == stage]
        if UNTOLD in order:
            return []  # nobody knows of which microbatch it had another's tensors
        if stage in facts.unseen or sorted(order) == sorted(before):
            before = order or before
            continue
        given = _in_place(order, before)
        if not given or not _by_module(facts, stage):
            return []
        return [_cause(facts, stage, given)]
    return []


def rearranged(facts: StepFacts) -> bool:
    """Whether some stage was called as often as it should be, for some microbatches twice and for others never.

    Then nothing was left out: tensors were taken for others.
    """
    every = list(range(facts.microbatches))
    called = [action for action, _ in facts.observed.called(0)]
    orders = [[a.microbatch for a in called if a.stage == stage] for stage in range(facts.stages)]
    told = [order for order in orders if UNTOLD not in order]
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
    return Cause(
        "wrong-message" if stage else "swapped-data",
        rank=facts.observed.schedule.placement[stage],
        stage=stage,
        microbatches=tuple(sorted(given)),
        action=f"{stage}F{first}",
        detail=f"its input is {told} ({stage}F{first})",
    )
