"""Stages that are cut inside among ranks: put together they are other code, and what that gives may be no evidence."""

from collections.abc import Sequence

from pipeproof.foreign.own_links import OwnStage
from pipeproof.observers.calls import Call
from pipeproof.observers.recording import MADE

_DRAWS = "stage {} draws random numbers, and layers that are cut among ranks draw others than it does put together"
_ALIKE = (
    "stage {} gives something else when it is put together than its ranks gave, all alike: a layer may be written for "
    "a rank's part, as attention with that one's number of heads, or all ranks are wrong alike"
)


def in_doubt(own: OwnStage, others: Sequence[Sequence[Call]]) -> str:
    """Why it is not known what ``own`` gives; empty if it is.

    ``others``: its calls on each other rank of the replica.
    """
    made = [(call, number, k) for k, (where, number), call in own.wrong() if where == MADE]
    wrong = [(call, number, [calls[k] for calls in others]) for call, number, k in made]
    if not wrong:
        return ""
    if own.drew:
        return _DRAWS.format(own.stage)
    alike = all(_digest(call, number) == _digest(one, number) for call, number, ones in wrong for one in ones)
    return _ALIKE.format(own.stage) if alike else ""


def _digest(call: Call, number: int) -> bytes:
    return call.outputs[number].digest if number < len(call.outputs) else b""
