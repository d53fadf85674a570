"""The sums over a mesh in numbers: whether each rank's gradients come out right, rank by rank and row by row.

Nothing is shared with the proof in symbols but the mesh itself.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction

from pipeproof.pipeline.mesh import Mesh, Tied
from pipeproof.pipeline.schedule import Schedule


def agrees(found: Mesh, schedule: Schedule) -> bool:
    """Whether each rank's gradients come out right, in numbers: each contribution is a random one of its own."""
    place, part, piece = (_places(found, axis) for axis in ("pp", "tp", "cp"))
    works = [[(int(m), piece[rank]) for m in found.shares[rank]] for rank in range(found.ranks)]
    beside, pieces = _beside(found, "pp", "tp"), _beside(found, "pp", "tp", "cp")
    near = [
        [group for axis in ("tp", "cp") for group in found.groups.get(axis, ((rank,),)) if rank in group]
        for rank in range(found.ranks)
    ]

    def started(rank: int, copy: int | None) -> list[Fraction]:
        """What a rank's backwards add up to, from microbatches on which all beside it worked at one time.

        Attention is over what the pieces beside it worked on, each with its own stages.
        """
        stages = frozenset(place[other] for group in near[rank] for other in group)
        total = [Fraction(0)] * found.rows
        for k in range(schedule.microbatches):
            units = frozenset(works[other][k] for other in beside[rank])
            context = frozenset(works[other][k][0] for other in pieces[rank])
            for row in range(found.rows):
                total[row] += _number(place[rank], part[rank], copy, units, context, stages, row)
        return total

    def expected(stage_place: int, own: int, copy: int | None, row: int) -> Fraction:
        count, pieces = schedule.microbatches * found.replicas, found.pieces
        units = [(m, one) for m in range(count) for one in range(pieces)]
        at, whole = frozenset([stage_place]), ((frozenset([unit]), frozenset(unit[:1])) for unit in units)
        return sum((_number(stage_place, own, copy, *both, at, row) for both in whole), Fraction(0))

    def right(rank: int, made: list[Fraction], copies: Sequence[tuple[int, int | None]]) -> bool:
        begin, end = found.holds[rank] if found.holds else kept[rank]
        wanted = [sum(expected(at, part[rank], copy, row) for at, copy in copies) for row in range(begin, end)]
        return [one * found.divisor for one in made] == wanted

    kept = rows_kept(found)
    own = _summed(found, [started(rank, None) for rank in range(found.ranks)])
    fine = all(right(rank, own[rank], [(place[rank], None)]) for rank in range(found.ranks))
    copies = all(_copies(found, schedule, one, started, right) for one in found.tied)
    return fine and copies and _whole(found, place, part)


def _copies(
    found: Mesh,
    schedule: Schedule,
    one: Tied,
    started: Callable[[int, int], list[Fraction]],
    right: Callable[[int, list[Fraction], Sequence[tuple[int, int | None]]], bool],
) -> bool:
    place = _places(found, "pp")
    own = {stage: _summed(found, [started(rank, stage) for rank in range(found.ranks)]) for stage in one.stages}
    has = {rank: [s for s in one.stages if schedule.placement[s] == place[rank]] for rank in range(found.ranks)}
    pipelines = [[rank for rank in group if has[rank]] for group in found.groups["pp"]]
    held = {(rank, stage): own[stage][rank] for rank in has for stage in has[rank]}
    for group in pipelines if one.groups is None else one.groups:
        if not all(has[rank] for rank in group):
            return False  # it has nothing to give, and the others wait
        shares = [held[rank, stage] for rank in group for stage in has[rank]]
        if len({*map(len, shares)}) > 1:
            return False  # no backend would add them
        total = [sum(values, Fraction(0)) for values in zip(*shares, strict=True)]
        held |= {(rank, stage): total for rank in group for stage in has[rank]}
    copies = [(schedule.placement[stage], stage) for stage in one.stages]
    return all(right(rank, made, copies) for (rank, _), made in held.items())


def _summed(found: Mesh, made: list[list[Fraction]]) -> list[list[Fraction]]:
    for one in found.sums:
        before = list(made)
        for group in found.groups[one.over]:
            values = [before[rank] for rank in group]
            if len({*map(len, values)}) > 1:
                return [[]] * len(made)  # no backend would add them
            total = [sum(each, Fraction(0)) / one.divisor for each in zip(*values, strict=True)]
            for k, rank in enumerate(group):
                begin, end = one.keeps[k] if one.keeps else (0, len(total))
                made[rank] = total[begin:end]
    return made


def rows_kept(found: Mesh) -> list[tuple[int, int]]:
    """Of each rank, the rows that it keeps in the end."""
    kept = [(0, found.rows)] * found.ranks
    for one in found.sums:
        for group in found.groups[one.over] if one.keeps else ():
            for k, rank in enumerate(group):
                first = kept[rank][0]
                kept[rank] = first + one.keeps[k][0], first + one.keeps[k][1]
    return kept


def _whole(found: Mesh, place: list[int], part: list[int]) -> bool:
    """All that there is lies somewhere, and the rows of a shard nowhere else."""
    parts = {*zip(place, part, strict=True)} == {(p, t) for p in {*place} for t in range(found.axes.get("tp", 1))}
    kept, scattered = rows_kept(found), {one.over for one in found.sums if one.keeps}
    return parts and all(_once(found, scattered, kept, rank) for rank in range(found.ranks))


def _once(found: Mesh, axes: set[str], kept: list[tuple[int, int]], rank: int) -> bool:
    """Whether of all rows each is kept once among ``rank`` and those with which it scatters."""
    every, before = {rank}, set[int]()
    while every != before:
        before = set(every)
        every |= {one for axis in axes for group in found.groups[axis] if every & {*group} for one in group}
    return Counter(row for one in every for row in range(*kept[one])) == Counter(range(found.rows))


def _places(found: Mesh, axis: str) -> list[int]:
    places = {rank: k for group in found.groups.get(axis, ()) for k, rank in enumerate(group)}
    return [places.get(rank, 0) for rank in range(found.ranks)]


def _beside(found: Mesh, *axes: str) -> list[set[int]]:
    """All ranks with which one works on a microbatch: its pipeline, and those along ``axes``."""
    beside = [{rank} for rank in range(found.ranks)]
    for axis in axes * found.ranks:
        for group in found.groups.get(axis, ()):
            every = set[int]().union(*(beside[rank] for rank in group))
            for rank in group:
                beside[rank] = every
    return beside


def _number(*key: object) -> int:
    return random.Random(repr([sorted(one) if isinstance(one, frozenset) else one for one in key])).randrange(1 << 60)
