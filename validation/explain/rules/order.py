"""In which order a stage ran, and what that leaves open of a cause."""

from dataclasses import replace

from pipeproof.core.cause import Cause
from pipeproof.explain.evidence import Evidence
from pipeproof.pipeline.action import Action, Kind


def ordered(evidence: Evidence, stage: int, kind: Kind) -> list[int]:
    """The microbatches of a stage's forwards or backwards, as they ran; empty where it was not watched."""
    flow = evidence.passed.get(stage)
    return [] if flow is None else [action.microbatch for action in flow.actions if action.kind is kind]


def turn_of(evidence: Evidence, action: Action) -> int:
    """How many actions of its kind its stage ran before ``action``."""
    order = ordered(evidence, action.stage, action.kind)
    return order.index(action.microbatch) if action.microbatch in order else len(order)


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
