"""Sums over a mesh, in symbols: each rank's gradient as counts of all ranks' terms.

Each pipeline of a mesh runs one program, whose terms ``symbolic`` shows. So before the sums a rank's gradient has,
once, each microbatch of the rank, and its content after them follows from groups and shares alone. No rank and no
microbatch stands for another; but a sum is worked out once for all who get it. A right gradient has every microbatch of
the step once, whatever the model and the data.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from pipeproof.pipeline.columns import Ints
from pipeproof.pipeline.laws import Violation
from pipeproof.pipeline.mesh import PARTS, PIECES, PIPELINE, Mesh, Rows, Sum, Tied
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.sizes import SHOWN, first_few, some


class _Part(NamedTuple):
    """A gradient's identity: its place in the pipeline, its part along tp, and its rows."""

    place: int
    part: int
    rows: Rows


class Sums:
    """Every rank's gradient after all sums: its identity ``of``, and the number ``made`` for its sum.

    ``totals``: for each sum, the count of each rank's own gradient in it; equal sums share a number. ``mixed``: the
    axis and ranks of sums over unlike gradients. ``cuts``: each sum whose group members keep only some rows, with the
    number of rows.
    """

    def __init__(self, mesh: Mesh, schedule: Schedule) -> None:
        self.mesh = mesh
        self.schedule = schedule
        self.place = mesh.places(PIPELINE).tolist()
        parts = mesh.places(PARTS).tolist()
        self.of = [_Part(*both, (0, mesh.rows)) for both in zip(self.place, parts, strict=True)]
        self.made = list(range(mesh.ranks))
        self.totals: list[Mapping[int, int]] = [{rank: 1} for rank in range(mesh.ranks)]
        self.mixed: list[tuple[str, Sequence[int]]] = []
        self.cuts: list[tuple[Sum, int]] = []
        for one in mesh.sums:
            self._add(one)

    def _add(self, one: Sum) -> None:
        known: dict[tuple[int, ...], int] = {}
        cut = set[int]()  # how many rows there were
        for group in self.mesh.groups[one.over]:
            if len({self.of[rank] for rank in group}) > 1:
                self.mixed.append((one.over, group))
            added = tuple(sorted(self.made[rank] for rank in group))
            number = known.setdefault(added, len(self.totals))
            if number == len(self.totals):
                self.totals.append(self._total(added))
            for k, rank in enumerate(group):
                self.made[rank] = number
                if one.keeps:  # rows are counted from the first summed one
                    (first, end), (begin, to) = self.of[rank].rows, one.keeps[k]
                    cut.add(end - first)
                    self.of[rank] = self.of[rank]._replace(rows=(first + begin, first + to))
        self.cuts += [(one, rows) for rows in sorted(cut)]

    def _total(self, added: Sequence[int]) -> Mapping[int, int]:
        total = Counter[int]()
        for number, times in Counter(added).items():
            for rank, often in self.totals[number].items():
                total[rank] += times * often
        return total

    @cached_property
    def units(self) -> list[Ints]:
        """By rank, work units in order: pieces of microbatches, each a number."""
        mesh, pieces, piece = self.mesh, self.mesh.pieces, self.mesh.places(PIECES).tolist()
        made: dict[tuple[int, int], Ints] = {}  # ranks that are given one list work on one
        for share, own in zip(mesh.shares, piece, strict=True):
            made.setdefault((id(share), own), share * pieces + own)
        return [made[id(share), own] for share, own in zip(mesh.shares, piece, strict=True)]

    def stages(self, place: int) -> str:
        """Name the stages at a place in the pipeline."""
        stages = self.schedule.stages_of(place)
        return f"stage{'s' * (len(stages) > 1)} {first_few(stages)}"

    def unit(self, unit: int) -> str:
        """Name a unit of work."""
        microbatch, piece = divmod(unit, self.mesh.pieces)
        return f"microbatch {microbatch}" + (f", {PIECES} {piece}" if self.mesh.pieces > 1 else "")

    def describe_units(self, units: Ints) -> str:
        """Name the first units of work."""
        first = ", ".join(str(unit // self.mesh.pieces) for unit in units[:4].tolist())
        piece = f", {PIECES} {units[0] % self.mesh.pieces}" if self.mesh.pieces > 1 and len(units) else ""
        return f"microbatches {first}{', ...' if len(units) > 4 else ''}{piece}"


Law = Callable[[Sums], Iterator[Violation]]


def groups(mesh: Mesh) -> Iterator[Violation]:
    """Along each axis, every rank belongs to one group, and groups have the axis's size."""
    ranks = mesh.ranks
    for axis, found in mesh.groups.items():
        counts = Counter(rank for group in found for rank in group)
        for rank in sorted({*range(ranks), *counts}):
            if rank >= ranks:
                yield Violation("groups", f"{axis}: ranks are 0..{ranks - 1}", rank)
            elif counts[rank] != 1:
                yield Violation("groups", f"{axis}: is in {some(counts[rank], 'group')}, expected 1", rank)
        for group in (group for group in found if len(group) != mesh.axes[axis]):
            said = f"{axis}: the group of ranks {first_few(group)} has {len(group)}, expected {mesh.axes[axis]}"
            yield Violation("groups", said)


def shares(found: Sums) -> Iterator[Violation]:
    """Ranks that share a pipeline, stages, or sequences work on equal microbatches, in one order.

    Parts and pieces belong to the same stages.
    """
    for axis in (PIPELINE, PARTS, PIECES):
        given = found.mesh.shares if axis == PIECES else found.units
        for first, *others in found.mesh.groups.get(axis, ()):
            for rank in others:
                (one, own), (other, its) = ((found.place[each], found.units[each]) for each in (rank, first))
                if axis != PIPELINE and one != other:
                    said = f"{axis}: has {found.stages(one)}, but rank {first} of its group has {found.stages(other)}"
                    yield Violation("shares", said, rank)
                if given[rank] is not given[first] and not np.array_equal(given[rank], given[first]):
                    units = [found.describe_units(one) for one in (own, its)]
                    said = f"{axis}: works on {units[0]}, but rank {first} of its group on {units[1]}"
                    yield Violation("shares", said, rank)


def sums(found: Sums) -> Iterator[Violation]:
    """Finally each rank's gradient has every microbatch once, from its own stages, evenly divided."""
    for axis, group in found.mixed:
        whole = {found.of[rank].place: rank for rank in reversed(group)}
        if len(whole) > 1:
            names = [f"rank {rank} of {found.stages(place)}" for place, rank in list(whole.items())[-1:-3:-1]]
            yield Violation("sums", f"{axis}: what is summed is not of the same stages: {' and '.join(names)}")
        else:
            yield Violation("sums", f"{axis}: ranks {first_few(group)} sum different parts of one gradient")
    if not found.mixed:
        yield from _find_miscounted(found)


def _find_miscounted(found: Sums) -> Iterator[Violation]:
    """Gradients with a wrong weight for a microbatch; the first such microbatch each.

    Weights decide, not counts: a mean over equal means once more changes nothing. A gradient with fewer units than
    exist lacks one of the first, so counting stops there.
    """
    mesh, checked = found.mesh, set[int]()
    total = found.schedule.microbatches * mesh.replicas * mesh.pieces
    divided = prod(one.divisor for one in mesh.sums)
    expected = divided // mesh.divisor if divided % mesh.divisor == 0 else -1
    over = ("", "") if divided == mesh.divisor else (f" over {divided}", f" over {mesh.divisor}")
    for rank, made in enumerate(found.made):
        if made in checked:  # the same sum, of another rank
            continue
        checked.add(made)
        units = np.concatenate([found.units[one] for one in found.totals[made]])
        often = np.repeat([*found.totals[made].values()], found.schedule.microbatches)
        counted = min(total, len(units) + 1)
        inside = units < counted
        has = np.bincount(units[inside], weights=often[inside], minlength=counted)
        said = f"{found.stages(found.place[rank])}: the gradient has"
        for unit in np.flatnonzero(has != expected)[:1].tolist():
            observed = f"{found.unit(unit)} {some(int(has[unit]), 'time')}{over[0]}"
            yield Violation("sums", f"{said} {observed}, expected once{over[1]}", rank)
        for unit in units[units >= total][:1].tolist():
            yield Violation("sums", f"{said} {found.unit(unit)}, but they are 0..{total // mesh.pieces - 1}", rank)


def parts(found: Sums) -> Iterator[Violation]:
    """All parts of a gradient are kept, each once, each rank keeps its optimizer's part, and some rank holds each.

    A rank may keep more: of a sum that all have, optimizers may each hold a part, as in ZeRO-1.
    """
    lost = [*_not_kept(found)]
    yield from lost or _not_held(found)
    expected = range(found.mesh.axes.get(PARTS, 1))
    has = {(one.place, one.part) for one in found.of}
    for place, part in sorted({(place, part) for place in {*found.place} for part in expected} - has):
        yield Violation("parts", f"no rank has {PARTS} {part} of {found.stages(place)}")


def _not_kept(found: Sums) -> Iterator[Violation]:
    for rank, rows in enumerate(found.mesh.holds):
        (first, end), (begin, to) = found.of[rank].rows, rows
        if _some(rows) and not first <= begin < to <= end:
            said = f"keeps the gradient of rows {_span((first, end))}, but its optimizer holds {_span(rows)}"
            yield Violation("parts", said, rank)
    for one, every in found.cuts:
        ends = [(0, 0), *sorted(rows for rows in one.keeps if _some(rows)), (every, every)]
        for (_, end), (begin, _) in pairwise(ends):
            if end != begin:
                who, between = ("no rank keeps" if end < begin else "several keep"), sorted((begin, end))
                who = "there are no" if between[0] >= every else who
                yield Violation("parts", f"{one.over}: {who} rows {between[0]} to {between[1]} of {every}")


def _not_held(found: Sums) -> Iterator[Violation]:
    """Rows with a kept gradient but without an optimizer."""
    held: dict[tuple[int, int], list[Rows]] = {}
    for one, rows in zip(found.of, found.mesh.holds, strict=bool(found.mesh.holds)):
        held.setdefault((one.place, one.part), []).append(rows)
    for (place, _), every in sorted(held.items()):
        to = 0
        for begin, end in (*sorted(rows for rows in every if _some(rows)), (found.mesh.rows, found.mesh.rows)):
            if begin > to:
                yield Violation("parts", f"{found.stages(place)}: no optimizer holds rows {to} to {begin}")
            to = max(to, end)


def tied(found: Sums) -> Iterator[Violation]:
    """Each copy of a tied parameter becomes the sum over one copy per stage, all for one part."""
    mesh = found.mesh
    for one in mesh.tied:
        owners = {stage: found.schedule.placement[stage] for stage in one.stages}
        holders = {rank for rank in range(mesh.ranks) if found.place[rank] in owners.values()}
        summed = _tied_groups(mesh, one, holders)
        counts, name = Counter(rank for group in summed for rank in group), f"stages {first_few(one.stages)}"
        for rank in sorted(holders | {*counts}):
            if rank not in holders:
                yield Violation("tied", f"{name}: has no copy, but is in a group", rank)
            elif counts[rank] != 1:
                yield Violation("tied", f"{name}: its copy is in {some(counts[rank], 'sum')}, expected 1", rank)
        for group in ([rank for rank in group if rank in holders] for group in summed):
            places = Counter(found.place[rank] for rank in group)
            for stage in (stage for stage, owner in owners.items() if places[owner] != 1):
                has = f"has stage {stage}'s copy {places[owners[stage]]} times, expected once"
                yield Violation("tied", f"{name}: the sum of {some(len(group), 'rank')} {first_few(group)} {has}")
            if len({found.of[rank]._replace(place=0) for rank in group}) > 1:
                yield Violation("tied", f"{name}: ranks {first_few(group)} sum different parts of the parameter")


LAWS: tuple[Law, ...] = (shares, sums, parts, tied)


def violations(mesh: Mesh, schedule: Schedule) -> tuple[Violation, ...]:
    """All violations against ``groups``, or without any, the first few against each law."""
    broken = [list(groups(mesh))]
    if not broken[0]:
        found = Sums(mesh, schedule)
        broken = [list(law(found)) for law in LAWS]
    return tuple(violation for of_law in broken for violation in _first(of_law))


def _first(broken: Sequence[Violation]) -> Iterator[Violation]:
    yield from broken[:SHOWN]
    if len(broken) > SHOWN:
        yield Violation(broken[0].law, f"and {len(broken) - SHOWN} more")


def _tied_groups(mesh: Mesh, one: Tied, holders: set[int]) -> Sequence[Sequence[int]]:
    """Groups summing copies."""
    if one.groups is not None:
        return one.groups
    pipelines = mesh.groups.get(PIPELINE) or [(rank,) for rank in range(mesh.ranks)]
    return [[rank for rank in pipeline if rank in holders] for pipeline in pipelines]


def _some(rows: Rows) -> Rows | None:
    """Return the rows, or None if empty: empty spans are equal."""
    return rows if rows[0] < rows[1] else None


def _span(rows: Rows) -> str:
    return f"{rows[0]} to {rows[1]}"
