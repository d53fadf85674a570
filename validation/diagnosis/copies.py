"""What ranks have of the gradients that they hold in common: microbatches of their own, or parts of a sum."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from pipeproof.core.cause import Cause, listed
from pipeproof.core.tolerance import error
from pipeproof.diagnosis.atoms import Term, Update
from pipeproof.diagnosis.combination import limit_of, residual_of, told_within
from pipeproof.diagnosis.known import Terms
from pipeproof.diagnosis.likeness import counted
from pipeproof.diagnosis.limits import ALIKE, CLOSE
from pipeproof.diagnosis.members import Members, Part, Replicas, Stage
from pipeproof.diagnosis.microbatch_weights import faults_in_counts
from pipeproof.observers.shards import Shard
from pipeproof.reference.step import Expected, Gradient, Site

Counts = tuple[float, ...]  # how often each microbatch is in a gradient
Pattern = tuple[tuple[int, Counts], ...]  # by rank


@dataclass(frozen=True)
class Region:
    """A part of a parameter, or all of it: what every rank has that holds it, and what each microbatch gives (M, D)."""

    seen: Mapping[int, Tensor]
    rows: Tensor

    def adds_up(self, replicas: Replicas) -> bool:
        """Whether what its ranks have adds up to the whole in each replica, and none of them has that already."""
        whole, groups = self.rows.sum(dim=0), dict[int, list[Tensor]]()
        for rank, gradient in self.seen.items():
            groups.setdefault(replicas.of[rank], []).append(gradient)
        largest = max(float(gradient.norm()) for gradient in self.seen.values())

        def is_whole(gradient: Tensor) -> bool:
            return float((gradient - whole).norm()) <= max(ALIKE * float(whole.norm()), CLOSE * largest)

        sums = [torch.stack(group).sum(dim=0) for group in groups.values() if len(group) > 1]
        return len(sums) == len(groups) and all(map(is_whole, sums)) and not any(map(is_whole, self.seen.values()))


@dataclass(frozen=True)
class Copies:
    """One parameter's gradient on every rank that holds any of it."""

    name: str
    regions: Sequence[Region]
    limit: float

    @property
    def size(self) -> float:
        """The largest that any rank has."""
        return max(float(one.norm()) for region in self.regions for one in region.seen.values())

    @property
    def ranks(self) -> list[int]:
        return sorted({rank for region in self.regions for rank in region.seen})

    def pattern(self) -> Pattern | None:
        """What each rank's is made of; None where that is not decided."""
        found: dict[int, Counts] = {}
        for region in self.regions:
            for rank, gradient in region.seen.items():
                counts = _makeup([(gradient, region.rows)], self.limit)
                if counts is None:
                    return None
                found[rank] = counts
        return tuple(sorted(found.items()))

    def fits(self, pattern: Pattern) -> bool:
        """Whether it is made so on every rank."""
        known = dict(pattern)
        return known.keys() >= {*self.ranks} and all(
            residual_of(gradient, region.rows, known[rank]) <= self._limit(known[rank])
            for region in self.regions
            for rank, gradient in region.seen.items()
        )

    def _limit(self, counts: Counts) -> float:
        return max(self.limit, ALIKE) if set(counts) == {1.0} else self.limit

    def adds_up(self, replicas: Replicas) -> bool:
        """Whether every region does."""
        return all(region.adds_up(replicas) for region in self.regions)


def copies_of(members: Members, expected: Expected, stage: Stage) -> Iterator[Copies]:
    """The parameters of ``stage`` that several ranks hold."""
    for k, name in stage.names.items():
        site = (stage.index, name)
        holders = [(rank, part) for rank, part in stage.part.members if k not in part.lacks and _has_any(part, k)]
        given = _given(members, expected, stage, name)
        parts = [gradient.double().cpu() for gradient in given if gradient is not None]
        lying: dict[Shard | None, dict[int, Tensor]] = {}
        for rank, part in holders:
            if (gradient := part.gradients[k]) is not None:
                lying.setdefault(part.shards.get(k), {})[rank] = gradient.double().cpu().flatten()
        due = expected.gradients.get(site)
        if due is None or len(parts) < len(given) or sum(map(len, lying.values())) < len(holders) or len(holders) < 2:
            continue
        rows = [_rows(parts, where, seen) for where, seen in lying.items()]
        regions = [Region(seen, row) for seen, row in zip(lying.values(), rows, strict=True) if row is not None]
        if len(regions) == len(lying):
            yield Copies(name, regions, limit_of(due.cpu().flatten(), torch.stack(parts).sum(dim=0).flatten()))


def _given(members: Members, expected: Expected, stage: Stage, name: str) -> list[Gradient]:
    """What each microbatch gives a parameter.

    Of copies under one name the first may be known to have the shares of all: then this is what it has.
    """
    due, own = expected.gradients.get((stage.index, name)), members.contributions
    for index in (stage.index, *(one.index for one in members.stages if name in one.names.values())):
        given = [one.gradients.get((index, name)) for one in own]
        parts = [one.double().cpu() for one in given if one is not None]
        if index == stage.index and parts:
            return given
        if due is None or len(parts) < len(given) or any(one.shape != due.shape for one in parts):
            continue
        if error(torch.stack(parts).sum(dim=0), due.double().cpu()) < max(ALIKE, told_within(due.dtype)):
            return given
    return [None for _ in own]


def _has_any(part: Part, k: int) -> bool:
    """Whether it has elements of parameter ``k``: of a flat parameter a rank may have none."""
    return k not in part.shards or part.shards[k].count > 0


def _rows(parts: Sequence[Tensor], where: Shard | None, seen: Mapping[int, Tensor]) -> Tensor | None:
    """What each microbatch gives there; None where what ranks have is no such part, or not finite."""
    if where is not None and where.addend[1] > 1:
        return None
    rows = torch.stack([(one if where is None else where.of(one)).flatten() for one in parts])
    fit = all(one.shape == rows[0].shape and bool(one.isfinite().all()) for one in seen.values())
    return rows if fit and rows.numel() else None


def unreduced(members: Members, expected: Expected, update: Update) -> list[Cause]:
    """A cause for each stage in which ranks lack microbatches of other replicas, and for its parameters if not all."""
    return [cause for stage in members.stages for cause in _lacking(members, expected, stage, update)]


def _lacking(members: Members, expected: Expected, stage: Stage, update: Update) -> Iterator[Cause]:
    copies, replicas = list(copies_of(members, expected, stage)), members.replicas
    ranks = tuple(sorted(rank for rank, _ in stage.part.members))
    every = range(replicas.microbatches)
    ones = (1.0,) * len(every)
    odd = [one for one in copies if not one.fits(_on_all(ranks, ones))]
    found = [pattern for one in odd if (pattern := one.pattern()) is not None]
    base = _base(found, among=len(copies)) or ones
    odd = [one for one in odd if not one.fits(_on_all(ranks, base))]
    alone: Pattern = tuple((rank, tuple(base[m] * (m in replicas.share(rank)) for m in every)) for rank in ranks)
    mean: Pattern = tuple((rank, tuple(replicas.count * c for c in counts)) for rank, counts in alone)
    lacking = False
    for pattern in dict.fromkeys([alone, mean, *found]):
        fitting = [one for one in odd if one.fits(pattern)]
        odd = [one for one in odd if one not in fitting]
        held = {rank for one in fitting for rank in one.ranks}
        counts = [(rank, counts) for rank, counts in pattern if rank in held]
        own = _own(counts, replicas)
        told = [_told(rank, counts, own[rank], base) for rank, counts in counts if counts != base]
        apart = replicas.count > 1 or sorted(m for some in own.values() for m in some) == list(every)
        if fitting and told and all(told) and apart:
            names = [one.name for one in fitting]
            faint = CLOSE * max(one.size for one in copies)
            whole = all(one.name in names or one.size < faint for one in copies)
            others = f" and {', '.join(names[1:])} are" if len(names) > 1 and not whole else ""
            detail = f"{others} not reduced over all replicas: {', '.join(told)}".lstrip()
            lacking = True
            one = None if whole else names[0]
            yield Cause("not-reduced", stage=stage.index, parameter=one, detail=detail, parameters=tuple(names))
    for fault in faults_in_counts(update, dict(enumerate(base)), ALIKE) if lacking and base != ones else ():
        yield Cause(fault.kind, None, stage.index, fault.microbatches, factor=fault.factor, detail=fault.detail)


def _on_all(ranks: Sequence[int], counts: Counts) -> Pattern:
    """The same on every rank."""
    return tuple((rank, counts) for rank in ranks)


def _base(patterns: Sequence[Pattern], *, among: int) -> Counts | None:
    """What more than half of the parameters are made of, on all ranks alike; None where that is not one thing."""
    alike = [{counts for _, counts in pattern} for pattern in patterns]
    times = Counter(next(iter(one)) for one in alike if len(one) == 1)
    counts, most = next(iter(times.most_common(1)), (None, 0))
    return counts if 2 * most > among else None


def _own(pattern: Sequence[tuple[int, Counts]], replicas: Replicas) -> dict[int, set[int]]:
    """Each rank's own microbatches: those that it has, where several have the same and others the rest.

    Otherwise those that it was given.
    """
    there = {rank: {m for m, c in enumerate(counts) if c} for rank, counts in pattern}
    distinct = {frozenset(one) for one in there.values()}
    apart = sorted(m for one in distinct for m in one) == list(range(replicas.microbatches))
    if replicas.count == 1 or (apart and all({*replicas.share(rank)} <= one for rank, one in there.items())):
        return there
    return {rank: {*replicas.share(rank)} for rank in there}


def _told(rank: int, counts: Counts, own: set[int], base: Counts) -> str:
    """What a rank lacks of other replicas beside ``base``, in words; empty if that is not all that is wrong."""
    lacking = [m for m, c in enumerate(counts) if c == 0 and base[m]]
    more = {m: c for m, c in enumerate(counts) if c not in (0.0, base[m])}
    if not lacking or not own or own & set(lacking) or not own >= set(more):
        return ""
    if set(lacking) | own >= {m for m, due in enumerate(base) if due}:
        return f"rank {rank} has the gradient of its own microbatches {listed(sorted(m for m in own if base[m]))} alone"
    several = len(lacking) > 1
    times = "".join(f" and has its own {m} {c:.4g} times" for m, c in more.items())
    added = f"reduced before {'they were' if several else 'it was'} added"
    return f"rank {rank} lacks microbatch{'es' * several} {listed(lacking)} of other replicas{times}: {added}"


def adding_up(members: Members, expected: Expected, wrong: Collection[Site], used: Mapping[str, int]) -> list[Cause]:
    """A cause for each stage whose ranks have parts of a sum, as where each has a part of every sequence.

    ``used``: in which order the reference uses parameters. What is wrong of one used before may follow.
    """
    return [cause for stage in members.stages for cause in _in_parts(members, expected, stage, wrong, used)]


def _in_parts(
    members: Members, expected: Expected, stage: Stage, wrong: Collection[Site], used: Mapping[str, int]
) -> Iterator[Cause]:
    copies = [one for one in copies_of(members, expected, stage) if (stage.index, one.name) in wrong]
    names = [one.name for one in copies if one.adds_up(members.replicas)]
    open_ = [name for of, name in sorted(wrong) if of == stage.index and name not in names]
    last = max((used.get(name, 0) for name in names), default=0)
    if not names or any(used.get(name, last) >= last for name in open_):
        return
    first = [name for name in names if used.get(name, 0) == last] if open_ else names
    held, apart = {rank for one in copies if one.name in first for rank in one.ranks}, members.replicas.of
    groups = groupby(sorted(held, key=lambda rank: (apart[rank], rank)), key=lambda rank: apart[rank])
    ranks = ", nor over ".join(f"ranks {listed(some)}" for _, some in groups)
    whole = len(first) == len(stage.names)
    others = f"and {', '.join(first[1:])} are " if len(first) > 1 and not whole else ""
    detail = f"{others}not reduced over {ranks}: what they have adds up to what is expected"
    if open_:
        detail += f"; what is wrong of parameters used before, as {open_[0]}, may follow from that"
    parameter, only = None if whole else first[0], () if open_ else tuple(first)
    yield Cause("not-reduced", stage=stage.index, parameter=parameter, detail=detail, parameters=only)


def of_shards(members: Members, expected: Expected, update: Update) -> list[Cause]:
    """What each rank's shards are made of, where ranks differ in that; none if any rank's tells nothing."""
    return [cause for stage in members.stages for cause in _of_shards(members, expected, stage, update)]


def apart_by_rank(members: Members, expected: Expected) -> tuple[int, int] | None:
    """Two ranks whose shards are not made of microbatches alike, as far as it is known; None if all are."""
    for made in (_makeup_by_rank(members, expected, stage) for stage in members.stages if stage.part.shards):
        (rank, counts), *others = [one for one in made.items() if one[1] is not None] or [(0, None)]
        for other, its in others:
            if its != counts:
                return rank, other
    return None


def _of_shards(members: Members, expected: Expected, stage: Stage, update: Update) -> Iterator[Cause]:
    if not stage.part.shards:
        return
    made = _makeup_by_rank(members, expected, stage)
    known = {rank: counts for rank, counts in made.items() if counts is not None}
    if len(known) < len(made) or len({*known.values()}) < 2:
        return
    odd = {rank: counts for rank, counts in known.items() if set(counts) != {1.0}}
    own = _own(list(odd.items()), members.replicas)
    told = [_told(rank, counts, own[rank], (1.0,) * len(counts)) for rank, counts in odd.items()]
    if all(told):
        yield Cause("not-reduced", stage=stage.index, detail=f"not reduced over all replicas: {', '.join(told)}")
        return
    for rank, counts in odd.items():
        for fault in faults_in_counts(update, dict(enumerate(counts)), ALIKE):
            detail = "; ".join(filter(None, (fault.detail, "in this rank's shards")))
            yield Cause(fault.kind, rank, stage.index, fault.microbatches, factor=fault.factor, detail=detail)


def _makeup_by_rank(members: Members, expected: Expected, stage: Stage) -> dict[int, Counts | None]:
    """How often each microbatch is in what each rank has of the stage; None where that is not decided."""
    held: dict[int, list[tuple[Tensor, Tensor]]] = {}
    copies = list(copies_of(members, expected, stage))
    for region in (region for one in copies for region in one.regions):
        for rank, gradient in region.seen.items():
            held.setdefault(rank, []).append((gradient, region.rows))
    limit = max((one.limit for one in copies), default=0.0)
    return {rank: _makeup(parts, limit) for rank, parts in sorted(held.items())}


def _plain(factor: float) -> float:
    """A whole number, or one over one, where it is that; else to as many digits as ranks have alike."""
    for near in (float(round(factor)), 1.0 / (round(1.0 / factor) or 1)):
        if abs(factor - near) < ALIKE * abs(factor):
            return near
    return float(f"{factor:.3g}")


def _makeup(parts: Sequence[tuple[Tensor, Tensor]], limit: float) -> Counts | None:
    """How often each microbatch is in all of ``parts``, each what is there and what microbatches give there."""
    seen, rows = torch.cat([one for one, _ in parts]), torch.cat([rows for _, rows in parts], dim=1)
    whole = rows.sum(dim=0)
    factor = float((seen * whole).sum() / whole.square().sum()) if whole.any() else 0.0
    if factor and error(seen, factor * whole) < ALIKE:
        return (_plain(factor),) * len(rows)
    found = counted(seen, Terms({Term("pair", m, m): row for m, row in enumerate(rows)}, {}), limit)
    return None if found is None or len(found) < len(rows) else tuple(count for _, count in found)
