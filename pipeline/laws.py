"""Static laws for schedules, one function each; all violations are collected, then raised once."""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeproof.pipeline.action import COMPUTE, GIVES_WEIGHT_GRADIENT, Action, Kind, ShardAction, ShardKind
from pipeproof.pipeline.columns import CODE, Columns, Ints, Mask
from pipeproof.pipeline.dataflow import NEVER, flow, stuck, suppliers
from pipeproof.pipeline.schedule import Schedule, ScheduleError
from pipeproof.pipeline.text_grid import mark_cells


@dataclass(frozen=True)
class Violation:
    """A broken law: its name, the violation, and the rank (None if several share the blame).

    ``cells`` are the (rank, slot) of its actions.
    """

    law: str
    message: str
    rank: int | None = None
    cells: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}: "
        return f"{self.law}: {where}{self.message}"


Law = Callable[[Schedule], Iterator[Violation]]


class LawBroken(ScheduleError):
    """A readable schedule or program that breaks laws; the message lists all violations on its grid."""


def at(columns: Columns, entry: int, law: str, message: str) -> Violation:
    """A violation by one entry."""
    return Violation(law, message, int(columns.rank[entry]), (columns.cell(entry),))


def compute_only(schedule: Schedule) -> Iterator[Violation]:
    """A schedule holds compute actions alone; sends and receives come from lowering."""
    columns = schedule.columns
    for entry in np.flatnonzero(~columns.is_kind(*COMPUTE)).tolist():
        yield at(columns, entry, "compute-only", f"{columns.action(entry)} is a message, which lowering adds by itself")


def placement(schedule: Schedule) -> Iterator[Violation]:
    """Every rank holds a stage; every action belongs to a stage on its rank, and to an existing microbatch."""
    for stage, owner in enumerate(schedule.placement):
        if not 0 <= owner < schedule.n_ranks:
            yield Violation("placement", f"stage {stage} is on rank {owner}: ranks are 0..{schedule.n_ranks - 1}")
    yield from (
        Violation("placement", "holds no stage", rank)
        for rank in sorted(set(range(schedule.n_ranks)) - set(schedule.placement))
    )
    yield from find_misplaced(schedule.columns, schedule)
    for one in schedule.shard_actions:
        if not 0 <= one.stage < schedule.n_stages:
            yield Violation("placement", f"{one}: stages are 0..{schedule.n_stages - 1}", one.rank)
        elif (owner := schedule.placement[one.stage]) != one.rank:
            yield Violation("placement", f"{one}: stage {one.stage} is on rank {owner}", one.rank)


def find_misplaced(columns: Columns, schedule: Schedule, *, among: Mask | None = None) -> Iterator[Violation]:
    """Entries (``among`` a mask) on another rank than their stage's, or with unknown stages or microbatches."""
    beyond = (columns.stage < 0) | (columns.stage >= schedule.n_stages)
    owner = np.array([*schedule.placement, NEVER])[np.where(beyond, -1, columns.stage)]
    unknown = (columns.microbatch < 0) | (columns.microbatch >= schedule.microbatches)
    wrong = beyond | unknown | (owner != columns.rank)
    for entry in np.flatnonzero(wrong if among is None else wrong & among).tolist():
        action = columns.action(entry)
        if beyond[entry]:
            yield at(columns, entry, "placement", f"{action}: stages are 0..{schedule.n_stages - 1}")
        elif owner[entry] != columns.rank[entry]:
            yield at(columns, entry, "placement", f"{action}: stage {action.stage} is on rank {owner[entry]}")
        if unknown[entry]:
            yield at(columns, entry, "placement", f"{action}: microbatches are 0..{schedule.microbatches - 1}")


def completeness(schedule: Schedule) -> Iterator[Violation]:
    """Each stage and microbatch has exactly one F, and one B or a pair I, W. Counted, not sets; and work exists."""
    if not schedule.placement or schedule.microbatches < 1:
        yield Violation("completeness", f"{schedule.n_stages} stages and {schedule.microbatches} microbatches: no work")
    columns = schedule.columns
    known, work = _work(schedule)
    kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    size = schedule.n_stages * max(0, schedule.microbatches)
    f, b, i, w = (np.bincount(work[known & columns.is_kind(kind)], minlength=size) for kind in kinds)
    once = ((b == 1) & (i == 0) & (w == 0)) | ((b == 0) & (i == 1) & (w == 1))
    for which in np.flatnonzero((f != 1) | ~once).tolist():
        stage, microbatch = divmod(which, schedule.microbatches)
        if f[which] != 1:
            message = f"{stage}F{microbatch} appears {f[which]} times, expected once"
            yield _those(columns, known & columns.is_kind(Kind.FORWARD) & (work == which), "completeness", message)
        if not once[which]:
            found = f"stage {stage} microbatch {microbatch} has {b[which]} B, {i[which]} I and {w[which]} W"
            here = known & columns.is_kind(*kinds[1:]) & (work == which)
            yield _those(columns, here, "completeness", f"{found}: expected one B, or one I and one W")


def _those(columns: Columns, those: Mask, law: str, message: str) -> Violation:
    """A violation by several entries or none, without a single rank to blame."""
    return Violation(law, message, None, tuple(map(columns.cell, np.flatnonzero(those).tolist())))


def _work(schedule: Schedule) -> tuple[Mask, Ints]:
    """Mask of entries with an existing stage and microbatch, and a number for each pair."""
    columns = schedule.columns
    known = (columns.stage >= 0) & (columns.stage < schedule.n_stages)
    known &= (columns.microbatch >= 0) & (columns.microbatch < schedule.microbatches)
    return known, np.where(known, columns.stage.astype(np.int64) * schedule.microbatches + columns.microbatch, 0)


def local_order(schedule: Schedule) -> Iterator[Violation]:
    """On its rank, a stage's forward comes before its backward, and I before W."""
    columns = schedule.columns
    known, work = _work(schedule)
    size = schedule.n_stages * max(0, schedule.microbatches)
    first = np.full((len(CODE), size), NEVER)
    entries = np.flatnonzero(known)[::-1]
    first[columns.kind[entries], work[entries]] = entries
    before = {Kind.BACKWARD: Kind.FORWARD, Kind.BACKWARD_INPUT: Kind.FORWARD, Kind.BACKWARD_WEIGHT: Kind.BACKWARD_INPUT}
    wrong: list[tuple[int, int]] = []
    for kind, needed in before.items():
        one, other = first[CODE[needed]], first[CODE[kind]]
        late = np.flatnonzero((other >= 0) & (one > other))
        late = late[columns.rank[one[late]] == columns.rank[other[late]]]
        wrong += zip(other[late].tolist(), one[late].tolist(), strict=True)
    for entry, needs in sorted(wrong):
        message = f"{columns.action(entry)} comes before {columns.action(needs)}"
        cells = (columns.cell(entry), columns.cell(needs))
        yield Violation("local-order", message, int(columns.rank[entry]), cells)


def acyclic(schedule: Schedule) -> Iterator[Violation]:
    """Ranks' orders and data flow between stages agree."""
    columns = schedule.columns
    supplier = suppliers(columns, schedule.n_stages)
    graph = flow(columns, supplier, node=schedule.nodes)
    reached = graph.reach()
    if reached[schedule.nodes].all():
        return
    for rank, action, need in stuck(columns, supplier, schedule.n_stages, reached[schedule.nodes]).waits:
        slot = schedule.ranks[rank].index(action)
        yield Violation("acyclic", f"{action} waits for {need}, which never comes", rank, ((rank, slot),))
    cycle = graph.shortest_cycle(~reached)[::-1]
    if len(cycle) > 1:
        first, *others = [f"rank {columns.rank[entry]} at {columns.action(entry)}" for entry in [*cycle, cycle[0]]]
        text = f"{first} waits for {', which waits for '.join(others)}"
        yield Violation("acyclic", text, None, tuple(map(columns.cell, cycle)))


def reduced_once(schedule: Schedule) -> Iterator[Violation]:
    """Reduced gradients: all stages reduce, once, after their last addition, with a wait each or no waits."""
    reduced = _of_kind(schedule, ShardKind.REDUCE_GRAD)
    waited = _of_kind(schedule, ShardKind.WAIT_REDUCE_GRAD)
    for what, found in (("REDUCE_GRAD", reduced), ("WAIT_REDUCE_GRAD", waited)):
        for stage in range(schedule.n_stages if found else 0):
            if (count := len(found.get(stage, ()))) != 1:
                message = f"{stage}{what} appears {count} times, expected once"
                yield Violation("reduced-once", message, schedule.placement[stage])
    order = schedule.shard_actions
    for stage, waits in waited.items():
        if stage in reduced and order.index(waits[0]) < order.index(reduced[stage][0]):
            yield Violation("reduced-once", f"{waits[0]} comes before {reduced[stage][0]}", waits[0].rank)
    columns = schedule.columns
    for stage, those in reduced.items():
        first, end = columns.bounds[those[-1].rank] + those[-1].slot, columns.bounds[those[-1].rank + 1]
        adds = columns.is_kind(*GIVES_WEIGHT_GRADIENT) & (columns.stage == stage)
        for entry in (first + np.flatnonzero(adds[first:end])).tolist():
            added = f"{columns.action(entry)} adds to stage {stage}'s gradient after {those[-1]}"
            yield at(columns, entry, "reduced-once", f"{added}: that is summed over no replicas")


def _of_kind(schedule: Schedule, kind: ShardKind) -> Mapping[int, Sequence[ShardAction]]:
    """By stage, shard actions of a kind on the stage's rank."""
    found = defaultdict[int, list[ShardAction]](list)
    for one in schedule.shard_actions:
        known = 0 <= one.stage < schedule.n_stages and schedule.placement[one.stage] == one.rank
        if one.kind is kind and known:
            found[one.stage].append(one)
    return found


def unsharded(schedule: Schedule) -> Iterator[Violation]:
    """With sharded parameters, a stage computes between UNSHARD and RESHARD, and ends in shards."""
    kinds = (ShardKind.UNSHARD, ShardKind.RESHARD)
    acts = [one for one in schedule.shard_actions if one.kind in kinds]
    for rank, row in enumerate(schedule.ranks if acts else ()):
        whole, reported = set[int](), set[int]()
        expected = deque(one for one in acts if one.rank == rank)
        for slot in range(len(row) + 1):
            while expected and expected[0].slot <= slot:
                one = expected.popleft()
                gathers = one.kind is ShardKind.UNSHARD
                if gathers == (one.stage in whole):
                    already = "is gathered already" if gathers else "is in shards already"
                    yield Violation("unsharded", f"{one}: stage {one.stage} {already}", rank)
                whole ^= {one.stage} if gathers != (one.stage in whole) else set()
            if slot < len(row) and row[slot].stage not in whole | reported:
                reported.add(row[slot].stage)
                message = f"{row[slot]} computes while stage {row[slot].stage}'s parameters are in shards"
                yield Violation("unsharded", message, rank, ((rank, slot),))
        for stage in sorted(whole):
            message = f"stage {stage} ends gathered: expected a {stage}RESHARD after its last {stage}UNSHARD"
            yield Violation("unsharded", message, rank)


LAWS: tuple[Law, ...] = (compute_only, placement, completeness, local_order, acyclic, reduced_once, unsharded)


def violations(schedule: Schedule, *, laws: Iterable[Law] = LAWS) -> tuple[Violation, ...]:
    """Every violation by any law, in the order of ``laws``."""
    return tuple(violation for law in laws for violation in law(schedule))


def check(schedule: Schedule, *, laws: Iterable[Law] = LAWS) -> Schedule:
    """Return ``schedule`` if lawful; else raise ``LawBroken`` with all violations, grouped by law."""
    found = violations(schedule, laws=laws)
    if found:
        raise LawBroken(report(schedule.name, found, schedule.ranks))
    return schedule


def report(name: str, found: Sequence[Violation], rows: Sequence[Sequence[Action]]) -> str:
    """All violations, grouped by law and cut if many, over the rows with their cells."""
    by_law: dict[str, list[Violation]] = defaultdict(list)
    for violation in found:
        by_law[violation.law].append(violation)
    bullets = [f"  - {violation}" for group in by_law.values() for violation in group[:8]]
    more = len(found) - len(bullets)
    tail = [f"  - and {more} more"] if more else []
    title = f"{name} breaks {len(by_law)} law{'s' * (len(by_law) > 1)}:"
    drawing = mark_cells(rows, {cell for violation in found for cell in violation.cells})
    return "\n".join([title, *bullets, *tail, *drawing])
