"""Pipeline replicas: all must agree, and the first one is judged."""

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
    """Combine all ranks' results, with microbatches numbered over all replicas."""
    return Observed(case.built, tuple(tuple(_place(case, rows, rank)) for rank in range(len(rows))))


def _place(case: Case, rows: Sequence[Row], rank: int) -> Iterator[RankOperation]:
    """Yield a rank's operations; later replicas keep actions, claims and losses alone."""
    replica, place = divmod(rank, case.ranks)
    share = case.share(replica)
    for observed, first in zip(rows[rank], rows[place], strict=True):
        if case.replicas == 1:
            yield observed
            continue
        numbered = replace(
            observed,
            executed=tuple(_renumber(action, share) for action in observed.executed),
            called=tuple((_renumber(action, share), training) for action, training in observed.called),
            share=tuple(share),
        )
        if replica:
            claims = tuple(_claims(rank, observed, place, first))
            numbered = replace(numbered, gradients=None, parameters=None, buffers=None, claims=claims)
        yield numbered


def _renumber(action: Action, share: range) -> Action:
    return action._replace(microbatch=share[action.microbatch])


def _claims(rank: int, observed: RankOperation, leader: int, first: RankOperation) -> Iterator[Claim]:
    """Yield claims that gradients, parameters and buffers equal the first replica's, bit for bit."""
    for what in ("gradients", "parameters", "buffers"):
        own: Mapping[Site, Tensor | None] = getattr(observed, what) or {}
        other: Mapping[Site, Tensor | None] = getattr(first, what) or {}
        for site in sorted({*own, *other}):
            difference = _difference(own.get(site), other.get(site))
            text = f"another {what.removesuffix('s')} than rank {leader}'s, {difference}"
            yield Claim("replicas", rank, site, not difference, text, f"rank {leader}'s, bit for bit", leader)


def _difference(observed: Tensor | None, wanted: Tensor | None) -> str:
    """Describe how two tensors differ; empty if equal."""
    if observed is None or wanted is None:
        return "" if observed is wanted else f"which has {'one' if observed is None else 'none'}"
    return "" if same_bits(observed, wanted) else f"relative error {error(observed, wanted):.2g}"
