"""Gradients that come to what an inner stage gave, and that no other stage sent: of a loss outside, or another output.

What a stage gives that is made of another of its outputs brings that one a gradient, too: how much is known where the
stage runs again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipeproof.core.ledger import Ledger
from pipeproof.core.reason import Reason
from pipeproof.observers.observed import Crossing, Passed
from pipeproof.observers.recording import RECEIVED
from pipeproof.wings.composed.link import Link
from pipeproof.wings.composed.own_calls import StageSeen

_UNNAMED = frozenset({"different", "noisy"})  # what more makes of a gradient is like nothing else
_OUTSIDE = (
    "a backward of one number{}, as of a loss, comes to what stage {} gave, and what came there is not what was sent, "
    "so that nobody knows what is due; let the stage itself add such a loss, or hand it on for the last stage's to add"
)
_SEVERAL = (
    "stage {} gives several tensors, and it is not known what it gives again, so that nobody knows what flows from one "
    "of them to another"
)


def why_unsure(stage: int, seen: StageSeen, links: Sequence[Link]) -> str:
    """Why more may have come to what an inner ``stage`` gave than was sent there; empty where it may not."""
    if seen.outside is not None:
        where = f" at {seen.outside[0].place}" if seen.outside else ""
        return Reason.OWN_BACKWARD.doubt(_OUTSIDE.format(where, stage))
    again = all(link.gives for link in links)
    several = not again and any(len(call.giving) > 1 for call in seen.calls)
    return Reason.LINK.doubt(_SEVERAL.format(stage)) if several else ""


def as_far_as_known(flow: Passed) -> Passed:
    """``flow`` of an inner stage to which more may have come than was sent: where it did, nobody knows what is due."""
    return replace(flow, crossings=tuple(map(_known, flow.crossings)))


def enter_unsure(
    stages: Mapping[int, StageSeen],
    links: Mapping[int, Sequence[Link]],
    flows: Mapping[int, Passed],
    ledger: Ledger,
) -> None:
    """Enter what came to ``stages`` of which nobody knows what is due."""
    for stage, flow in flows.items():
        names = [f"{one.what} of {one.at}" for one in flow.crossings if _is_left(one)]
        if names and (why := why_unsure(stage, stages[stage], links[stage])):
            ledger.leave_out("boundaries", names, why)


def _known(one: Crossing) -> Crossing:
    unnamed = one.where == RECEIVED and one.really is not None and one.really.kind in _UNNAMED
    return replace(one, same=True, judged=False) if unnamed and one.judged else one


def _is_left(one: Crossing) -> bool:
    return one.where == RECEIVED and not one.judged and one.really is not None
