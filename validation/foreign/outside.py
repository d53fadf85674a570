"""Losses that a step adds outside its stages: what they bring to what an inner stage gave, no other stage sent."""

from collections.abc import Mapping
from dataclasses import replace

from pipeproof.foreign.own_calls import StageSeen
from pipeproof.judging.ledger import Ledger
from pipeproof.observers.observed import Crossing, Passed
from pipeproof.observers.recording import RECEIVED

_UNNAMED = frozenset({"different", "noisy"})  # what a loss makes of a gradient is like nothing else
_CURE = (
    "and what came there is not what was sent, so that nobody knows what is due; let the stage itself add such a loss, "
    "or hand it on for the last stage's to add"
)


def without_outside(flow: Passed) -> Passed:
    """``flow`` of an inner stage to which a loss came: where more came than was sent, nobody knows what was due."""
    return replace(flow, crossings=tuple(map(_as_far_as_known, flow.crossings)))


def enter_outside(stages: Mapping[int, StageSeen], flows: Mapping[int, Passed], ledger: Ledger) -> None:
    """Enter what came to ``stages`` of such losses."""
    for stage, flow in flows.items():
        names = [f"{one.what} of {one.at}" for one in flow.crossings if _is_left(one)]
        if names and (stack := stages[stage].outside) is not None:
            at = f" at {stack[0].place}" if stack else ""
            told = f"a backward of one number{at}, as of a loss, comes to what stage {stage} gave"
            ledger.leave_out("boundaries", names, f"{told}, {_CURE}")


def _as_far_as_known(one: Crossing) -> Crossing:
    unnamed = one.where == RECEIVED and one.really is not None and one.really.kind in _UNNAMED
    return replace(one, same=True, judged=False) if unnamed and one.judged else one


def _is_left(one: Crossing) -> bool:
    return one.where == RECEIVED and not one.judged and one.really is not None
