"""Torch's CSV, cell by cell: a row per rank, an action per cell, blank cells for idle slots.

Two dialects. 2.13 writes the sends and receives of ``compute_comms`` alone; 2.15 also where each send is waited for
(``0WAIT_SEND_F3``), which 2.13 would misread as ``0W``. Both write an overlapping pair as ``(0F7;7B3)OVERLAP_F_B``, and
both may hold cells about a stage's parameters (``0UNSHARD``), which move nothing between stages and are kept apart.
"""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pipeproof.pipeline.action import COMPUTE, Action, ActionError, Kind, ScheduleError, ShardAction

_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


@dataclass(frozen=True)
class Cells:
    """A file's content: actions by row, and (rank, slot) for forwards that overlap with the next action."""

    rows: tuple[tuple[Action, ...], ...]
    overlaps: tuple[tuple[int, int], ...]
    shard_actions: tuple[ShardAction, ...] = ()


def read_cells(text: str) -> Cells:
    """Read every cell in full, or fail. Raises ``ScheduleError`` with row and column."""
    try:
        lines = list(csv.reader(io.StringIO(text.rstrip())))
    except csv.Error as error:
        raise ScheduleError(f"not comma-separated text: {error}") from None
    if not lines:
        raise ScheduleError("there is no action at all: expected a row for each rank, e.g. 0F0,0F1,0B0,0B1")
    return cells_of(lines)


def cells_of(lines: Sequence[Sequence[str]]) -> Cells:
    """Parse the cells of every rank's line. Raises ``ScheduleError`` with row and column."""
    rows, overlaps, shard_actions = [], list[tuple[int, int]](), list[ShardAction]()
    for rank, line in enumerate(lines):
        row: list[Action] = []
        computed = 0
        for column, cell in enumerate(map(str.strip, line), start=1):
            if one := ShardAction.parse(cell, rank, computed):
                shard_actions.append(one)
                continue
            try:
                actions = _actions(cell)
            except ActionError as error:
                raise ScheduleError(f"row {rank + 1}, column {column}: {error}") from None
            if len(actions) == 2:
                overlaps.append((rank, len(row)))
            row += actions
            computed += sum(action.kind in COMPUTE for action in actions)
        if not row:
            raise ScheduleError(f"row {rank + 1} has no action: a row is a rank, and every rank holds a stage")
        rows.append(tuple(row))
    return Cells(tuple(rows), tuple(overlaps), tuple(shard_actions))


def _actions(cell: str) -> list[Action]:
    """Parse a cell: one action, two that overlap, or none."""
    if not cell:
        return []
    pair = _PAIR.fullmatch(cell)
    if pair is None:
        return [Action.parse(cell)]
    forward, backward = Action.parse(pair[1]), Action.parse(pair[2])
    if forward.kind is not Kind.FORWARD or backward.kind is not Kind.BACKWARD:
        raise ActionError(f"{cell!r} does not overlap a forward F with a full backward B, in this order")
    return [forward, backward]


def write_cells(cells: Cells) -> str:
    """Write ``cells`` as comma-separated text, one line per row; ``read_cells`` inverts it."""
    first = frozenset(cells.overlaps)
    beside: dict[tuple[int, int], list[str]] = {}
    for one in cells.shard_actions:
        beside.setdefault((one.rank, one.slot), []).append(str(one))
    lines = []
    for rank, row in enumerate(cells.rows):
        line, after = list(beside.get((rank, 0), ())), list[str]()
        computed = 0
        for slot, action in enumerate(row):
            if (rank, slot - 1) in first:
                line[-1] = f"({line[-1]};{action})OVERLAP_F_B"
            else:
                line.append(str(action))
            if action.kind in COMPUTE:
                computed += 1
                after += beside.get((rank, computed), ())
            if (rank, slot) not in first:  # nothing comes between two that are one cell
                line, after = line + after, []
        lines.append(line)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()
