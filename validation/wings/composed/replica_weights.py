"""Replicas of a stage: they begin a step with the same weights, or their sums are no gradient of one model."""

from collections.abc import Mapping, Sequence

from pipeproof.core.cause import Cause
from pipeproof.core.ledger import Heading, Ledger
from pipeproof.reference.step import Site

Weights = Mapping[Site, tuple[str, bytes]]  # of a rank: which part of each parameter it has, and the digest of that
_LAW = "initial-weights"
RENAMED = "rename= gives each weight its name in the whole model, as lambda stage, name: f'{stage}.{name}'"


def enter_weights(ledger: Ledger, ranks: Sequence[Weights]) -> list[Cause]:
    """Enter whether ranks that have the same of a parameter began with the same; the causes where they did not."""
    first: dict[tuple[Site, str], tuple[int, bytes]] = {}
    apart: dict[tuple[int, int, int], list[str]] = {}
    compared = 0
    for rank, weights in enumerate(ranks):
        for site, (part, digest) in weights.items():
            at, due = first.setdefault((site, part), (rank, digest))
            stage, name = site
            if at != rank:
                place = Heading.at(_LAW, 0, rank=rank, stage=stage, parameter=name)
                ledger.hold(place, digest == due, "other weights", f"rank {at}'s weights")
                compared += 1
            if digest != due:
                apart.setdefault((at, rank, stage), []).append(name)
    if not compared:
        ledger.skip(_LAW, "no two ranks have the same part of a weight")
    return [
        Cause(
            "replicas-apart",
            rank=rank,
            stage=stage,
            parameter=names[0] if len(names) == 1 else None,
            detail=f"{len(names)} of its parameters are not rank {at}'s",
        )
        for (at, rank, stage), names in apart.items()
    ]


def not_one(ranks: Sequence[Weights], cure: str = RENAMED) -> str:
    """Why weights of several stages are not one that they have in common, though they have one name; empty if they are.

    ``ranks``: of one replica. ``cure``: how a weight gets another name.
    """
    first: dict[tuple[str, str], tuple[int, bytes]] = {}
    apart: dict[str, tuple[int, int]] = {}
    for (stage, name), (part, digest) in (pair for weights in ranks for pair in weights.items()):
        at, due = first.setdefault((name, part), (stage, digest))
        if digest != due and at != stage:
            apart.setdefault(name, (at, stage))
    if not apart:
        return ""
    name, (one, other) = next(iter(apart.items()))
    more = f", and {len(apart) - 1} more" * (len(apart) > 1)
    return (
        f"stages {one} and {other} both have a weight that is called {name}{more}, and they begin with others in it: "
        f"{cure}; if it is one weight, its copies are apart"
    )
