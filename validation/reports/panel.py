"""A picture's panel: a timeline's cells, or the slots in a schedule that breaks a law."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

from pipeproof.pipeline.action import COMPUTE, Action, Kind
from pipeproof.pipeline.laws import Violation
from pipeproof.pipeline.memory import peaks_of
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.sizes import shorten, some
from pipeproof.pipeline.trace import Trace

WORDS: Mapping[Kind, str] = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "input gradient",
    Kind.BACKWARD_WEIGHT: "weight gradients",
}
_MOST_SAID, _LONGEST = 6, 300  # violations over a picture, and letters of one


class Cell(NamedTuple):
    """``action`` on the row of ``rank``, from ``left`` to ``right`` on the axis; ``says``: its full description."""

    rank: int
    left: float
    right: float
    action: Action
    says: str
    wrong: bool = False


@dataclass(frozen=True)
class Panel:
    """``pairs``: cells that run as one. A tick at x shows ``per_tick`` times x."""

    title: str
    facts: tuple[str, ...]
    schedule: Schedule
    cells: tuple[Cell, ...]
    axis: str
    pairs: tuple[tuple[Cell, Cell], ...] = ()
    per_tick: float = 1.0

    @cached_property
    def wrong(self) -> bool:
        """True if any cell breaks a law."""
        return any(cell.wrong for cell in self.cells)

    @cached_property
    def end(self) -> float:
        """End of the last cell."""
        return max((cell.right for cell in self.cells), default=0.0)

    @cached_property
    def places(self) -> dict[int, int]:
        """Position of each stage among its rank's stages, from 0."""
        held = (self.schedule.stages_of(rank) for rank in range(self.schedule.n_ranks))
        return {stage: place for stages in held for place, stage in enumerate(stages)}

    @cached_property
    def most(self) -> int:
        """The most stages on a rank: V."""
        return 1 + max(self.places.values(), default=0)


def draw_trace(name: str, trace: Trace, *, unit: str = "") -> Panel:
    """Draw ``trace`` over time; ``unit``: its unit, if not seconds. Facts follow the rules of a simulation's times."""

    def spell(time: float) -> str:
        return f"{time * 1e3:.4g} ms" if trace.in_seconds else f"{time:g}"

    schedule, whole = trace.schedule, trace.makespan
    cells: dict[Action, Cell] = {}
    for span in chain.from_iterable(trace.spans):
        if span.worked > 0:
            says = f"{_name(span.action)}, on rank {span.rank}, {spell(span.worked_from)} to {spell(span.ended)}"
            cells[span.action] = Cell(span.rank, span.worked_from, span.ended, span.action, says)
    pairs = []
    for rank, slot in schedule.overlaps:
        one, other = schedule.ranks[rank][slot : slot + 2]
        if one in cells and other in cells:
            for cell, beside in ((one, other), (other, one)):
                cells[cell] = cells[cell]._replace(says=f"{cells[cell].says}, as one with {beside}")
            pairs.append((cells[one], cells[other]))
    rows = [[span for span in spans if span.action.kind in COMPUTE] for spans in trace.spans]
    busy = [sum(span.worked for span in row) for row in rows]
    lasts = [row[-1].ended - row[0].worked_from if row else 0.0 for row in rows]
    bubble = whole - max(busy)
    peaks = [peak.value for peak in peaks_of(schedule.columns)]
    facts = (
        f"makespan {spell(whole)}",
        f"global bubble {spell(bubble)} ({bubble / whole if whole else 0:.1%})",
        f"local bubble {spell(max(last - work for last, work in zip(lasts, busy, strict=True)))}",
        f"memory: at most {some(round(max(peaks)), 'microbatch')} of one stage, on rank {peaks.index(max(peaks))}",
    )
    axis = "time in milliseconds" if trace.in_seconds else f"time in units of {unit or 'T_F, T_I and T_W'}"
    title, per_tick = f"{name}: {schedule.sizes}", 1e3 if trace.in_seconds else 1.0
    return Panel(title, facts, schedule, tuple(cells.values()), axis, tuple(pairs), per_tick)


def _name(action: Action) -> str:
    what = WORDS.get(action.kind, action.kind.lower().replace("_", " "))
    return f"{action}: stage {action.stage}, {what} of microbatch {action.microbatch}"


def in_slots(name: str, schedule: Schedule, rows: Sequence[Sequence[Action]], broken: Sequence[Violation]) -> Panel:
    """Draw ``rows`` by slot, with the cells of ``broken`` marked: a broken law leaves no times."""
    wrong = {cell: violation for violation in reversed(broken) for cell in violation.cells}
    cells = []
    for rank, row in enumerate(rows):
        for slot, action in enumerate(row):
            violation = wrong.get((rank, slot))
            says = _name(action) if violation is None else f"{_name(action)}. {violation}"
            cells.append(Cell(rank, slot, slot + 1, action, says, violation is not None))
    more = [f"and {len(broken) - _MOST_SAID} more"] if len(broken) > _MOST_SAID else []
    facts = (*(shorten(str(violation), _LONGEST) for violation in broken[:_MOST_SAID]), *more)
    laws = some(len({violation.law for violation in broken}), "law")
    title = f"{name} breaks {laws}: {schedule.sizes}"
    return Panel(title, facts, schedule, tuple(cells), "slots, in the order of each rank: no times")
