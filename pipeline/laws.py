"""The static laws of a schedule, one function each; every violation is collected, then raised once."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pipeline.action import COMPUTE, Action, Kind
from pipeline.dataflow import flow, stuck, suppliers
from pipeline.schedule import Schedule, ScheduleError


@dataclass(frozen=True)
class Violation:
    """A law broken by a schedule: which law, by what, and on which rank (None where no one rank is to blame)."""

    law: str
    message: str
    rank: int | None = None

    def __str__(self) -> str:
        where = "" if self.rank is None else f"rank {self.rank}: "
        return f"{self.law}: {where}{self.message}"


Law = Callable[[Schedule], Iterator[Violation]]


def compute_only(schedule: Schedule) -> Iterator[Violation]:
    """A schedule holds compute actions alone; sends and receives come from lowering."""
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if action.kind not in COMPUTE:
                yield Violation("compute-only", f"{action} is a message, which lowering adds by itself", rank)


def placement(schedule: Schedule) -> Iterator[Violation]:
    """Every rank holds a stage; every action is of a stage that its rank holds, for a microbatch that exists."""
    for stage, owner in enumerate(schedule.placement):
        if not 0 <= owner < schedule.n_ranks:
            yield Violation("placement", f"stage {stage} is on rank {owner}: ranks are 0..{schedule.n_ranks - 1}")
    for rank, actions in enumerate(schedule.ranks):
        if rank not in schedule.placement:
            yield Violation("placement", "holds no stage", rank)
        for action in actions:
            if not 0 <= action.stage < schedule.n_stages:
                yield Violation("placement", f"{action}: stages are 0..{schedule.n_stages - 1}", rank)
            elif schedule.placement[action.stage] != rank:
                owner = schedule.placement[action.stage]
                yield Violation("placement", f"{action}: stage {action.stage} is on rank {owner}", rank)
            if not 0 <= action.microbatch < schedule.microbatches:
                yield Violation("placement", f"{action}: microbatches are 0..{schedule.microbatches - 1}", rank)


def completeness(schedule: Schedule) -> Iterator[Violation]:
    """There is work, and each stage and microbatch has exactly one F, and one B or one pair I, W. Counted, not sets."""
    if not schedule.placement or schedule.microbatches < 1:
        yield Violation("completeness", f"{schedule.n_stages} stages and {schedule.microbatches} microbatches: no work")
    counts: Counter[Action] = Counter(action for actions in schedule.ranks for action in actions)
    for stage in range(schedule.n_stages):
        for microbatch in range(schedule.microbatches):
            f, b, i, w = (
                counts[Action(stage, kind, microbatch)]
                for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
            )
            if f != 1:
                yield Violation("completeness", f"{stage}F{microbatch} appears {f} times, expected once")
            if (b, i, w) not in ((1, 0, 0), (0, 1, 1)):
                found = f"stage {stage} microbatch {microbatch} has {b} B, {i} I and {w} W"
                yield Violation("completeness", f"{found}: expected one B, or one I and one W")


def local_order(schedule: Schedule) -> Iterator[Violation]:
    """On its rank, a stage's forward comes before its backward, and I before W."""
    before = {Kind.BACKWARD: Kind.FORWARD, Kind.BACKWARD_INPUT: Kind.FORWARD, Kind.BACKWARD_WEIGHT: Kind.BACKWARD_INPUT}
    for rank, actions in enumerate(schedule.ranks):
        first: dict[Action, int] = {}
        for slot, action in enumerate(actions):
            first.setdefault(action, slot)
        for action, slot in first.items():
            if action.kind not in before:
                continue
            needed = Action(action.stage, before[action.kind], action.microbatch)
            if first.get(needed, -1) > slot:
                yield Violation("local-order", f"{action} comes before {needed}", rank)


def acyclic(schedule: Schedule) -> Iterator[Violation]:
    """The ranks' orders and the flow of data between stages do not contradict each other."""
    columns = schedule.columns
    supplier = suppliers(columns, schedule.n_stages)
    reached = flow(columns, supplier, node=schedule.nodes).reached()[schedule.nodes]
    if not reached.all():
        for rank, action, need in stuck(columns, supplier, schedule.n_stages, reached).waits:
            yield Violation("acyclic", f"{action} waits for {need}, which never comes", rank)


LAWS: tuple[Law, ...] = (compute_only, placement, completeness, local_order, acyclic)


def violations(schedule: Schedule) -> tuple[Violation, ...]:
    """Every violation of every law, in the order of ``LAWS``."""
    return tuple(violation for law in LAWS for violation in law(schedule))


def check(schedule: Schedule) -> Schedule:
    """``schedule`` itself if it keeps every law; else ``ScheduleError`` that lists all violations, grouped by law."""
    found = violations(schedule)
    if not found:
        return schedule
    by_law: dict[str, list[Violation]] = defaultdict(list)
    for violation in found:
        by_law[violation.law].append(violation)
    bullets = [f"  - {violation}" for group in by_law.values() for violation in group[:8]]
    more = len(found) - len(bullets)
    tail = [f"  - and {more} more"] if more else []
    title = f"{schedule.name} breaks {len(by_law)} law{'s' * (len(by_law) > 1)}:"
    raise ScheduleError("\n".join([title, *bullets, *tail]))
