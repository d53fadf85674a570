"""What each rank's gradient of a parameter is made of: how often each microbatch is in it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from pipeproof.core.observe.shards import Shard
from pipeproof.core.replicas import Replicas
from pipeproof.core.tolerance import error
from pipeproof.explain.limits import ALIKE
from pipeproof.explain.members import HeldGradient, Members
from pipeproof.explain.solver import counts_of, limit_of, residual_of, told_within
from pipeproof.reference.step import Expected

Counts = tuple[float, ...]  # how often each microbatch is in a gradient


@dataclass(frozen=True)
class Copy:
    """The gradient that a rank has of a parameter, or of a part of it, flat and in fp64 (D).

    ``rows``: what each microbatch gives there (M, D), or what all give together (1, D). ``limit``: what rounding leaves
    of a sum of these; ``loose``: what it may leave of sums over ranks.
    """

    rank: int
    stage: int
    where: Shard | None
    seen: Tensor
    rows: Tensor
    limit: float
    loose: float

    @property
    def due(self) -> Tensor:
        return self.rows.sum(dim=0)

    @property
    def right(self) -> bool:
        return self.fits((1.0,) * len(self.rows))

    def fits(self, counts: Counts) -> bool:
        """Whether it has each microbatch as often as that."""
        limit = max(self.limit, ALIKE) if set(counts) == {1.0} else self.limit
        return len(counts) == len(self.rows) and residual_of(self.seen, self.rows, counts) <= limit


@dataclass(frozen=True)
class Makeup:
    """What the copies of one parameter are made of; None where that is not known of one."""

    copies: Sequence[Copy]
    counts: Sequence[Counts | None]

    @property
    def right(self) -> bool:
        """Whether every copy is."""
        return all(one.right for one in self.copies)

    @property
    def alike(self) -> bool:
        """Whether all copies are made alike, as far as that is known."""
        known = [(copy, one) for copy, one in zip(self.copies, self.counts, strict=True) if one is not None]
        return not known or any(all(copy.fits(counts) for copy, _ in known) for _, counts in known)


def makeups(members: Members, expected: Expected) -> dict[str, Makeup]:
    """By parameter, what ranks' copies and shards are made of; none of those that cannot be held against what is due.

    Few elements decide nothing by themselves: they are held against what a rank's wrong gradients are made of together.
    """
    found = _copies(members, expected)
    wrong = sorted(
        (one for copies in found.values() for one in copies if not one.right),
        key=lambda one: (one.rank, one.stage, len(one.rows)),
    )
    known = {place: _made_of(list(some)) for place, some in groupby(wrong, key=lambda one: (one.rank, one.stage))}

    def counts_of(copy: Copy) -> Counts | None:
        likely = [(1.0,) * len(copy.rows), *_own(copy, members.replicas), known.get((copy.rank, copy.stage))]
        for counts in filter(None, likely):
            if copy.fits(counts):
                return counts
        return _made_of([copy])

    return {name: Makeup(copies, [counts_of(one) for one in copies]) for name, copies in found.items()}


def _own(copy: Copy, replicas: Replicas) -> list[Counts]:
    """The microbatches that the rank is given, alone: once each, or divided by no more than their own number."""
    own = {*replicas.share(copy.rank)} if replicas.count > 1 and len(copy.rows) == replicas.microbatches else set()
    return [tuple(times * (m in own) for m in range(len(copy.rows))) for times in (1.0, float(replicas.count)) if own]


def _copies(members: Members, expected: Expected) -> dict[str, list[Copy]]:
    found = {}
    for name, every in members.held.items():
        dues = [expected.gradients.get((one.stage, name)) for one in every]
        due = next((one for one in dues if one is not None), None)
        if due is None:
            continue
        rows = _rows(name, {one.stage for one in every}, due, members)
        limit = limit_of(due.cpu().flatten(), rows.sum(dim=0).flatten())
        copies = [_copy(one, rows, limit, max(ALIKE, told_within(due.dtype))) for one in every]
        fit = [one for one in copies if one is not None]
        if len(fit) == len(copies):
            found[name] = fit
    return found


def _rows(name: str, stages: Collection[int], due: Tensor, members: Members) -> Tensor:
    """What each microbatch gives (M, ...); ``due`` alone (1, ...) where it is not known to be the sum of these."""
    whole = due.double().cpu()
    for stage in sorted(stages):
        given = [one.gradients.get((stage, name)) for one in members.contributions]
        parts = [torch.zeros_like(whole) if one is None else one.double().cpu() for one in given]
        if parts and all(one.shape == whole.shape for one in parts):
            rows = torch.stack(parts)
            if error(rows.sum(dim=0), whole) < max(ALIKE, told_within(due.dtype)):
                return rows
    return whole[None]


def _copy(one: HeldGradient, rows: Tensor, limit: float, loose: float) -> Copy | None:
    """What ``one`` has; None where that is no such part, one addend of several, or not finite."""
    where = one.where
    if one.gradient is None or (where is not None and where.addend[1] > 1):
        return None
    own = torch.stack([(row if where is None else where.of(row)).flatten() for row in rows])
    seen = one.gradient.double().cpu().flatten()
    if seen.shape != own.shape[1:] or not seen.numel() or not bool(seen.isfinite().all()):
        return None
    return Copy(one.rank, one.stage, where, seen, own, limit, loose)


def _made_of(copies: Sequence[Copy]) -> Counts | None:
    """How often each microbatch is in all of ``copies``, which are one rank's; None where that is not decided."""
    if len({len(one.rows) for one in copies}) > 1:
        return None
    seen, rows = torch.cat([one.seen for one in copies]), torch.cat([one.rows for one in copies], dim=1)
    whole = rows.sum(dim=0)
    factor = float((seen * whole).sum() / whole.square().sum()) if whole.any() else 0.0
    if error(seen, factor * whole) < ALIKE or not seen.any():
        return (_plain(factor),) * len(rows)
    return counts_of(seen, [*rows], max(one.limit for one in copies)) if len(rows) > 1 else None


def _plain(factor: float) -> float:
    """A whole number, or one over one, where it is that; else to as many digits as ranks have alike."""
    for near in (float(round(factor)), 1.0 / (round(1.0 / factor) or 1) if factor else 0.0):
        if abs(factor - near) <= ALIKE * abs(factor):
            return near
    return float(f"{factor:.3g}")
