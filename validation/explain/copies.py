"""Gradients on each rank as counts per microbatch."""

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
from pipeproof.explain.solver import counts_of, limit_of, residual_of, tell_within
from pipeproof.reference.step import Expected

Counts = tuple[float, ...]  # how often each microbatch is in a gradient


@dataclass(frozen=True)
class Copy:
    """A rank's gradient of a parameter, or a part, flat and in fp64 (D).

    ``rows``: each microbatch's addend (M, D), or the sum of all (1, D). ``limit``: rounding of a sum of these;
    ``loose``: rounding of sums over ranks.
    """

    rank: int
    stage: int
    where: Shard | None
    observed: Tensor
    rows: Tensor
    limit: float
    loose: float

    @property
    def expected(self) -> Tensor:
        return self.rows.sum(dim=0)

    @property
    def right(self) -> bool:
        return self.fits((1.0,) * len(self.rows))

    def fits(self, counts: Counts) -> bool:
        """True if ``counts`` explain the observed gradient."""
        limit = max(self.limit, ALIKE) if set(counts) == {1.0} else self.limit
        return len(counts) == len(self.rows) and residual_of(self.observed, self.rows, counts) <= limit


@dataclass(frozen=True)
class Makeup:
    """A parameter's copies with their counts; None if unknown."""

    copies: Sequence[Copy]
    counts: Sequence[Counts | None]

    @property
    def right(self) -> bool:
        """True if every copy contains each microbatch once."""
        return all(one.right for one in self.copies)

    @property
    def alike(self) -> bool:
        """True if all copies have equal counts, or unknown ones."""
        known = [(copy, one) for copy, one in zip(self.copies, self.counts, strict=True) if one is not None]
        return not known or any(all(copy.fits(counts) for copy, _ in known) for _, counts in known)


def makeups(members: Members, expected: Expected) -> dict[str, Makeup]:
    """By parameter, the counts of ranks' copies and shards; only parameters with an expected gradient.

    Few elements decide nothing by themselves: they are compared with the counts of the rank's other wrong gradients.
    """
    found = _copies(members, expected)
    wrong = sorted(
        (one for copies in found.values() for one in copies if not one.right),
        key=lambda one: (one.rank, one.stage, len(one.rows)),
    )
    known = {place: _counts_of(list(some)) for place, some in groupby(wrong, key=lambda one: (one.rank, one.stage))}

    def counts_of(copy: Copy) -> Counts | None:
        likely = [(1.0,) * len(copy.rows), *_own(copy, members.replicas), known.get((copy.rank, copy.stage))]
        for counts in filter(None, likely):
            if copy.fits(counts):
                return counts
        return _counts_of([copy])

    return {name: Makeup(copies, [counts_of(one) for one in copies]) for name, copies in found.items()}


def _own(copy: Copy, replicas: Replicas) -> list[Counts]:
    """Candidate counts: the rank's microbatches alone, once each, or divided by only their number."""
    own = {*replicas.share(copy.rank)} if replicas.count > 1 and len(copy.rows) == replicas.microbatches else set()
    return [tuple(times * (m in own) for m in range(len(copy.rows))) for times in (1.0, float(replicas.count)) if own]


def _copies(members: Members, expected: Expected) -> dict[str, list[Copy]]:
    found = {}
    for name, every in members.held.items():
        totals = [expected.gradients.get((one.stage, name)) for one in every]
        total = next((one for one in totals if one is not None), None)
        if total is None:
            continue
        rows = _rows(name, {one.stage for one in every}, total, members)
        limit = limit_of(total.cpu().flatten(), rows.sum(dim=0).flatten())
        copies = [_copy(one, rows, limit, max(ALIKE, tell_within(total.dtype))) for one in every]
        fit = [one for one in copies if one is not None]
        if len(fit) == len(copies):
            found[name] = fit
    return found


def _rows(name: str, stages: Collection[int], expected: Tensor, members: Members) -> Tensor:
    """Addends by microbatch (M, ...); ``expected`` alone (1, ...) if they do not sum to it."""
    whole = expected.double().cpu()
    for stage in sorted(stages):
        given = [one.gradients.get((stage, name)) for one in members.contributions]
        parts = [torch.zeros_like(whole) if one is None else one.double().cpu() for one in given]
        if parts and all(one.shape == whole.shape for one in parts):
            rows = torch.stack(parts)
            if error(rows.sum(dim=0), whole) < max(ALIKE, tell_within(expected.dtype)):
                return rows
    return whole[None]


def _copy(one: HeldGradient, rows: Tensor, limit: float, loose: float) -> Copy | None:
    """The copy on a rank; None for an unusable form, one addend among several, or non-finite values."""
    where = one.where
    if one.gradient is None or (where is not None and where.addend[1] > 1):
        return None
    own = torch.stack([(row if where is None else where.of(row)).flatten() for row in rows])
    observed = one.gradient.double().cpu().flatten()
    if observed.shape != own.shape[1:] or not observed.numel() or not bool(observed.isfinite().all()):
        return None
    return Copy(one.rank, one.stage, where, observed, own, limit, loose)


def _counts_of(copies: Sequence[Copy]) -> Counts | None:
    """Count each microbatch in a rank's ``copies``; None if undecided."""
    if len({len(one.rows) for one in copies}) > 1:
        return None
    observed, rows = torch.cat([one.observed for one in copies]), torch.cat([one.rows for one in copies], dim=1)
    whole = rows.sum(dim=0)
    factor = float((observed * whole).sum() / whole.square().sum()) if whole.any() else 0.0
    if error(observed, factor * whole) < ALIKE or not observed.any():
        return (_plain(factor),) * len(rows)
    return counts_of(observed, [*rows], max(one.limit for one in copies)) if len(rows) > 1 else None


def _plain(factor: float) -> float:
    """Round to a nearby whole number or reciprocal; else to the digits that ranks share."""
    for near in (float(round(factor)), 1.0 / (round(1.0 / factor) or 1) if factor else 0.0):
        if abs(factor - near) <= ALIKE * abs(factor):
            return near
    return float(f"{factor:.3g}")
