"""Replicas of a pipeline as one: what each of them has must be equal, and the first one's is judged."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from pipeproof.core.observe.observed import Claim, Observed, RankOperation
from pipeproof.core.observe.recording import Site
from pipeproof.core.tolerance import error, same_bits
from pipeproof.own.case import Case
from pipeproof.pipeline.action import Action

Row = Sequence[RankOperation]


def as_one(case: Case, rows: Sequence[Row]) -> Observed:
    """What all ranks of ``case`` gave, with microbatches numbered over all replicas."""
    return Observed(case.built, tuple(tuple(_placed(case, rows, rank)) for rank in range(len(rows))))


def _placed(case: Case, rows: Sequence[Row], rank: int) -> Iterator[RankOperation]:
    """The operations of ``rank``; of another replica than the first only what is its own, and how it compares."""
    replica, place = divmod(rank, case.ranks)
    share = case.share(replica)
    for seen, first in zip(rows[rank], rows[place], strict=True):
        if case.replicas == 1:
            yield seen
            continue
        numbered = replace(
            seen,
            executed=tuple(_numbered(action, share) for action in seen.executed),
            called=tuple((_numbered(action, share), training) for action, training in seen.called),
            share=tuple(share),
        )
        if replica:
            claims = tuple(_claims(rank, seen, place, first))
            numbered = replace(numbered, gradients=None, parameters=None, buffers=None, claims=claims)
        yield numbered


def _numbered(action: Action, share: range) -> Action:
    return action._replace(microbatch=share[action.microbatch])


def _claims(rank: int, seen: RankOperation, leader: int, first: RankOperation) -> Iterator[Claim]:
    """That gradients, parameters and buffers are those of the same rank of the first replica, bit for bit."""
    for what in ("gradients", "parameters", "buffers"):
        own: Mapping[Site, Tensor | None] = getattr(seen, what) or {}
        other: Mapping[Site, Tensor | None] = getattr(first, what) or {}
        for site in sorted({*own, *other}):
            difference = _difference(own.get(site), other.get(site))
            text = f"another {what.removesuffix('s')} than rank {leader}'s, {difference}"
            yield Claim("replicas", rank, site, not difference, text, f"rank {leader}'s, bit for bit", leader)


def _difference(seen: Tensor | None, wanted: Tensor | None) -> str:
    """How two tensors differ, in words; empty if they do not."""
    if seen is None or wanted is None:
        return "" if seen is wanted else f"which has {'one' if seen is None else 'none'}"
    return "" if same_bits(seen, wanted) else f"relative error {error(seen, wanted):.2g}"
