"""What boundaries show against what final gradients are made of: more evidence must not make a name worse.

Each explains some of what is wrong. Where gradients are explained to the last, and what passed a boundary is not, they
say more; where both name something and these do not go together, both are told.
"""

from collections.abc import Sequence
from dataclasses import replace

from validation.foreign.step_facts import StepFacts
from validation.judging.cause import Cause

_VAGUE = frozenset({"altered", "computation"})  # that a tensor is another, not what it is
_ALIKE: tuple[frozenset[str], ...] = (  # kinds that one fault has where more, or less, of it is seen
    frozenset({"mispaired", "wrong-message", "overwritten", "partition", "stale-tensor"})
    | {"swapped-activations", "swapped-gradients", "swapped-data"},
    frozenset({"dropped", "zero", "missing", "uninitialised"}),
    frozenset({"doubled", "scale", "sign", "unequal-weights"}),
)


def complete(facts: StepFacts) -> Sequence[Cause]:
    """The causes that final gradients name, where they explain every one of them; else none."""
    found = facts.attribution
    return () if found is None or found.unknown else found.causes


def otherwise(facts: StepFacts, causes: Sequence[Cause]) -> Sequence[Cause]:
    """What final gradients say in place of ``causes``, where these are of backwards alone and do not agree."""
    if not all("B" in (cause.action or "B") for cause in causes):
        return ()  # what went wrong in a forward, all gradients follow from
    said = complete(facts)
    return () if any(_agree(one, other) for one in causes for other in said) else said


def informed(cause: Cause, facts: StepFacts) -> Cause:
    """``cause``, or what final gradients say that it was, where boundaries show no more than that a tensor is another.

    What a stage computed wrongly in a backward shows in the gradients of the one before.
    """
    if cause.kind not in _VAGUE or cause.stage is None or "B" not in (cause.action or ""):
        return cause
    place = cause.stage - (cause.kind == "computation")
    for one in complete(facts):
        if one.stage == place and one.parameter is None and set(one.microbatches) == set(cause.microbatches):
            return replace(one, rank=cause.rank, stage=cause.stage, action=cause.action)
    return cause


def _agree(one: Cause, other: Cause) -> bool:
    alike = one.kind == other.kind or one.kind in _VAGUE or any({one.kind, other.kind} <= group for group in _ALIKE)
    apart = None not in (one.stage, other.stage) and one.stage != other.stage
    some = set(one.microbatches), set(other.microbatches)
    return alike and not apart and (not all(some) or some[0] <= some[1] or some[1] <= some[0])
