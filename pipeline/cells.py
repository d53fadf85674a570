"""Torch's CSV, cell by cell: a row per rank, an action per cell, blank cells for idle slots.

Two dialects. 2.13 writes the sends and receives of ``compute_comms`` alone; 2.15 also where each send is waited for
(``0WAIT_SEND_F3``), which 2.13 would misread as ``0W``. Both write an overlapping pair as ``(0F7;7B3)OVERLAP_F_B``, and
both may hold cells about a stage's parameters (``0UNSHARD``), which move nothing between stages and are skipped.
"""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pipeproof.pipeline.action import Action, ActionError, Kind, ScheduleError

_NUMBER = "(?:0|[1-9][0-9]{0,8})"
_SKIPPED = re.compile(f"{_NUMBER}(UNSHARD|RESHARD|REDUCE_GRAD|WAIT_REDUCE_GRAD)")
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")


@dataclass(frozen=True)
class Cells:
    """What a file says: every row's actions, and the (rank, slot) of forwards that overlap with what follows."""

    rows: tuple[tuple[Action, ...], ...]
    overlaps: tuple[tuple[int, int], ...]


def read_cells(text: str) -> Cells:
    """Strict: every cell in full or not at all. Raises ``ScheduleError`` that names row and column."""
    try:
        lines = list(csv.reader(io.StringIO(text.rstrip())))
    except csv.Error as error:
        raise ScheduleError(f"not comma-separated text: {error}") from None
    if not lines:
        raise ScheduleError("there is no action at all: expected a row for each rank, e.g. 0F0,0F1,0B0,0B1")
    rows, overlaps = [], []
    for rank, line in enumerate(lines):
        row: list[Action] = []
        for column, cell in enumerate(line, start=1):
            try:
                actions = _actions(cell.strip())
            except ActionError as error:
                raise ScheduleError(f"row {rank + 1}, column {column}: {error}") from None
            if len(actions) == 2:
                overlaps.append((rank, len(row)))
            row += actions
        if not row:
            raise ScheduleError(f"row {rank + 1} has no action: a row is a rank, and every rank holds a stage")
        rows.append(tuple(row))
    return Cells(tuple(rows), tuple(overlaps))


def _actions(cell: str) -> list[Action]:
    """The actions of a cell: one, two that overlap, or none."""
    if not cell or _SKIPPED.fullmatch(cell):
        return []
    pair = _PAIR.fullmatch(cell)
    if pair is None:
        return [Action.parse(cell)]
    forward, backward = Action.parse(pair[1]), Action.parse(pair[2])
    if forward.kind is not Kind.FORWARD or backward.kind is not Kind.BACKWARD:
        raise ActionError(f"{cell!r} does not overlap a forward F with a full backward B, in this order")
    return [forward, backward]


def write_cells(rows: Sequence[Sequence[Action]], overlaps: Iterable[tuple[int, int]] = ()) -> str:
    """``rows`` as comma-separated text, one line per row; ``read_cells`` is its inverse."""
    first = frozenset(overlaps)
    lines = []
    for rank, row in enumerate(rows):
        cells: list[str] = []
        for slot, action in enumerate(row):
            if (rank, slot - 1) in first:
                cells[-1] = f"({cells[-1]};{action})OVERLAP_F_B"
            else:
                cells.append(str(action))
        lines.append(cells)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()
