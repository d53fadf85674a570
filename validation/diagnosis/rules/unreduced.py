"""Replicas of a stage whose gradients were reduced in part: not all parameters, or before all microbatches were in."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.step import Expected
from validation.diagnosis.atoms import Term
from validation.diagnosis.combination import residual_of
from validation.diagnosis.explanation import limit_of
from validation.diagnosis.members import Members, Stage
from validation.diagnosis.outlier import Parts, counted
from validation.judging.cause import Cause
from validation.observers.share import Replicas

Counts = tuple[float, ...]  # how often each microbatch is in a gradient
Pattern = tuple[tuple[int, Counts], ...]  # by rank


@dataclass(frozen=True)
class _Copies:
    """One parameter's gradient on every rank that holds it, and what each microbatch gives (M, D)."""

    name: str
    seen: Mapping[int, Tensor]
    rows: Tensor
    limit: float

    def pattern(self) -> Pattern | None:
        """What each rank's is made of; None where that is not decided."""
        terms = {Term("pair", m, m): row for m, row in enumerate(self.rows)}
        found = {rank: counted(gradient, Parts(terms, {}, self.limit)) for rank, gradient in self.seen.items()}
        if any(counts is None or len(counts) < len(self.rows) for counts in found.values()):
            return None
        return tuple((rank, tuple(c for _, c in counts or ())) for rank, counts in sorted(found.items()))

    def fits(self, pattern: Pattern) -> bool:
        """Whether it is made so on every rank."""
        known = dict(pattern)
        return known.keys() == self.seen.keys() and all(
            residual_of(gradient, self.rows, known[rank]) <= self.limit for rank, gradient in self.seen.items()
        )


def unreduced(members: Members, expected: Expected) -> list[Cause]:
    """A cause for each stage in which ranks lack microbatches of other replicas, and for its parameters if not all."""
    return [cause for stage in members.stages for cause in _of_stage(members, expected, stage)]


def _of_stage(members: Members, expected: Expected, stage: Stage) -> Iterator[Cause]:
    copies, replicas = list(_copies(members, expected, stage)), members.replicas
    ranks = tuple(sorted(rank for rank, _ in stage.part.members))
    every = range(replicas.microbatches)
    right: Pattern = tuple((rank, (1.0,) * len(every)) for rank in ranks)
    alone: Pattern = tuple((rank, tuple(float(m in replicas.share(rank)) for m in every)) for rank in ranks)
    mean: Pattern = tuple((rank, tuple(replicas.count * c for c in counts)) for rank, counts in alone)
    odd = [one for one in copies if not one.fits(right)]
    found = [pattern for one in odd if (pattern := one.pattern()) is not None]
    for pattern in dict.fromkeys([alone, mean, *found]):
        names = [one.name for one in odd if one.fits(pattern)]
        odd = [one for one in odd if one.name not in names]
        own = {rank: _own(rank, counts, replicas) for rank, counts in pattern}
        told = [_told(rank, counts, own[rank]) for rank, counts in pattern if set(counts) != {1.0}]
        apart = replicas.count > 1 or sorted(m for some in own.values() for m in some) == list(every)
        if names and told and all(told) and apart:
            whole = len(names) == len(copies)
            what = f"stage {stage.index} was" if whole else f"{', '.join(names)} {'was' if len(names) == 1 else 'were'}"
            detail = f"{what} not reduced over all replicas: {', '.join(told)}"
            name = None if whole else names[0]
            yield Cause("not-reduced", stage=stage.index, parameter=name, detail=detail)


def _copies(members: Members, expected: Expected, stage: Stage) -> Iterator[_Copies]:
    """The parameters that every rank holds whole."""
    for k, name in stage.names.items():
        site, holders = (stage.index, name), stage.part.members
        given = [one.gradients.get(site) for one in members.contributions]
        parts = [gradient.double().cpu().flatten() for gradient in given if gradient is not None]
        seen = {rank: part.gradients[k] for rank, part in holders if k not in part.shards}
        flat = {rank: gradient.double().cpu().flatten() for rank, gradient in seen.items() if gradient is not None}
        if len(parts) == len(given) and len(flat) == len(holders):
            rows = torch.stack(parts)
            due = expected.gradients[site]
            assert due is not None, "every microbatch has one"
            if all(one.shape == rows[0].shape and bool(one.isfinite().all()) for one in flat.values()):
                yield _Copies(name, flat, rows, limit_of(due.cpu().flatten(), rows.sum(dim=0)))


def _own(rank: int, counts: Counts, replicas: Replicas) -> set[int]:
    """A rank's own microbatches; where ranks are no replicas of each other, those that its gradient has in it."""
    return set(replicas.share(rank)) if replicas.count > 1 else {m for m, c in enumerate(counts) if c}


def _told(rank: int, counts: Counts, own: set[int]) -> str:
    """What a rank lacks of other replicas, in words; empty if that is not all that is wrong."""
    lacking = [m for m, c in enumerate(counts) if c == 0]
    more = {m: c for m, c in enumerate(counts) if c not in (0.0, 1.0)}
    if not lacking or own & set(lacking) or not own >= set(more):
        return ""
    if set(lacking) | own == set(range(len(counts))):
        return f"rank {rank} has the gradient of its own microbatches {_listed(sorted(own))} alone"
    several = len(lacking) > 1
    times = "".join(f" and has its own {m} {c:.4g} times" for m, c in more.items())
    added = f"reduced before {'they were' if several else 'it was'} added"
    return f"rank {rank} lacks microbatch{'es' * several} {_listed(lacking)} of other replicas{times}: {added}"


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
