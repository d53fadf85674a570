"""Stages that are cut inside among ranks: put together they are other code, and what that gives may be no evidence."""

from collections.abc import Sequence

from pipeproof.observers.calls import Call
from pipeproof.observers.recording import MADE
from pipeproof.reference.step import Site
from pipeproof.wings.composed.replica_weights import Weights
from pipeproof.wings.composed.rerun import StageRerun

_DRAWS = "stage {} draws random numbers, and layers that are cut among ranks draw others than it does put together"
_ALIKE = (
    "stage {} gives something else when it is put together than its ranks gave, all alike: a layer may be written for "
    "a rank's part, as attention with that one's number of heads, or all ranks are wrong alike"
)


_PARTS = (
    "ranks that run the same microbatches are given other parts of them in their first stage: that is not checked so"
)
_ORDERS = (
    "ranks that have a stage together are given its microbatches in another order in their first stage: each is to be "
    "given the same at the same time"
)
_BY_HAND = (
    "{} is another on ranks {} and {}, which run the same microbatches, and no DTensor: layers that are cut by hand "
    "are not put together, and what is on all ranks must be the same there"
)


def of_parts(calls: Sequence[Call], others: Sequence[Sequence[Call]]) -> str:
    """Why a replica's ranks cannot be put together that are given parts of its data; empty where they have it whole.

    ``calls`` are those of the first stage on this rank, ``others`` on each other rank of the replica.
    """
    own = [[one.digest for one in call.inputs] for call in calls]
    every = [[[one.digest for one in call.inputs] for call in there] for there in others]
    if all(there == own for there in every):
        return ""
    return _ORDERS if all(sorted(there) == sorted(own) for there in every) else _PARTS


def cut_by_hand(ranks: Sequence[Weights], replicas: Sequence[int]) -> str:
    """Why ranks of one of the ``replicas`` are not judged that have other weights under one name; empty for others."""
    first: dict[tuple[int, Site], tuple[int, bytes]] = {}
    for rank, (weights, replica) in enumerate(zip(ranks, replicas, strict=True)):
        for site, (part, digest) in weights.items():
            at, due = first.setdefault((replica, site), (rank, digest))
            if not part and digest != due:
                return _BY_HAND.format(site[1], at, rank)
    return ""


def in_doubt(own: StageRerun, others: Sequence[Sequence[Call]]) -> str:
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
