"""The lines of the user's own code that a cause is about."""

from collections.abc import Iterator
from dataclasses import replace

from pipeproof.diagnosis.evidence import Evidence
from pipeproof.judging.cause import CalledAt, Cause
from pipeproof.pipeline.action import Action, ActionError, Kind
from pipeproof.worlds.stack import Stack

# What kinds of cause are about, where they name no action.
_BACKWARDS = frozenset({"dropped", "doubled", "swapped-activations", "swapped-gradients", "mispaired"})
_WEIGHTS = frozenset({"scale", "sign", "unequal-weights"})  # of losses, where no stage is named
_FORWARDS = frozenset({"computation", "mode", "randomness", "swapped-data"})
_MESSAGES = frozenset({"wrong-message", "mispaired", "overwritten", "uninitialised", "rounded", "altered"})
_BROUGHT = {Kind.FORWARD: Kind.RECV_F, Kind.BACKWARD: Kind.RECV_B}  # by which an action was given what it works on


def with_lines(cause: Cause, evidence: Evidence) -> Cause:
    """``cause`` with where the user's code called for the actions that it is about, as far as that was seen."""
    stacks: dict[Action, Stack] = {}
    for passed in evidence.passed.values():
        stacks |= passed.stacks
    found = [action for action in _about(cause, evidence.stages) if action in stacks]
    return replace(cause, calls=tuple(CalledAt(str(action), stacks[action]) for action in found if stacks[action]))


def _about(cause: Cause, stages: int) -> Iterator[Action]:
    """The actions of which lines are shown: the receive, where it may be what is wrong, and what worked on that."""
    action = _named(cause, stages)
    if action is None:
        return
    if cause.kind in _MESSAGES:
        yield action._replace(kind=Kind.RECV_F if cause.kind == "overwritten" else _BROUGHT[action.kind])
    yield action


def _named(cause: Cause, stages: int) -> Action | None:
    """The action that ``cause`` names, as the forward or backward of a module; or the first of those it is about."""
    if cause.action is not None:
        try:
            action = Action.parse(cause.action)
        except ActionError:  # of a call whose microbatch nobody knows
            return None
        kind = Kind.FORWARD if action.kind in (Kind.FORWARD, Kind.SEND_F, Kind.RECV_F) else Kind.BACKWARD
        return action._replace(kind=kind)
    stage = cause.stage if cause.stage is not None else min(cause.stages, default=None)
    if cause.kind in _WEIGHTS and cause.parameter is None:
        return Action(stages - 1 if stage is None else stage, Kind.BACKWARD, min(cause.microbatches, default=0))
    if stage is None or not cause.microbatches or cause.kind not in _BACKWARDS | _FORWARDS | _MESSAGES:
        return None
    return Action(stage, Kind.FORWARD if cause.kind in _FORWARDS | _MESSAGES else Kind.BACKWARD, cause.microbatches[0])
