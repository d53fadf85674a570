"""A schedule drawn as text: a row per rank, a column per unit of time."""

from collections.abc import Collection, Sequence

from pipeproof.pipeline.action import Action
from pipeproof.pipeline.schedule import Schedule, ScheduleError
from pipeproof.pipeline.sizes import MOST_ACTIONS
from pipeproof.pipeline.timeline import Timeline, simulate


def grid(schedule: Schedule) -> str:
    """Draw the schedule as in the papers: F takes one cell and B two (I and W one each), a dot means idle.

    A cell is an action as everywhere else, ``2F0``; the later cells of a long action repeat its name.
    """
    return draw(simulate(schedule))


def draw(timeline: Timeline) -> str:
    """Draw ``timeline`` on a grid of whole units. Raises ``ScheduleError`` for an action between two."""
    columns = round(timeline.makespan)
    if columns * len(timeline.schedule.ranks) > MOST_ACTIONS:
        raise ScheduleError(f"cannot draw: {timeline.makespan:g} units of time are too many columns")
    rows = [["."] * columns for _ in timeline.schedule.ranks]
    for rank, actions in enumerate(timeline.schedule.ranks):
        for action, start, end in zip(actions, timeline.starts[rank], timeline.ends[rank], strict=True):
            if (start, end) != (round(start), round(end)):
                raise ScheduleError(f"cannot draw: {action} runs from {start:g} to {end:g}, which are not whole units")
            for column in range(round(start), round(end)):
                rows[rank][column] = str(action)
    width = max(len(cell) for row in rows for cell in row)
    label = len(str(len(rows) - 1))
    return "\n".join(
        f"rank {rank:>{label}} | " + " ".join(f"{cell:>{width}}" for cell in row) for rank, row in enumerate(rows)
    )


# How much of a row is drawn on either side of its first marked cell, and how many rows are drawn at most.
_AROUND, _ROWS = 6, 12


def mark_cells(rows: Sequence[Sequence[Action]], cells: Collection[tuple[int, int]]) -> list[str]:
    """The rows of ``cells`` (rank, slot), in slots rather than in time, with cells in brackets; [] for none.

    Long rows are cut around their first marked cell, and only the first rows are drawn.
    """
    lines = []
    for rank in sorted({rank for rank, _ in cells})[:_ROWS]:
        first = min(slot for owner, slot in cells if owner == rank)
        start, end = max(0, first - _AROUND), first + _AROUND + 1
        row = [
            f"[{action}]" if (rank, start + k) in cells else f" {action} "
            for k, action in enumerate(rows[rank][start:end])
        ]
        dots = ("... " if start else "", " ..." if end < len(rows[rank]) else "")
        lines.append(f"  rank {rank} | {dots[0]}{''.join(row).strip()}{dots[1]}")
    return lines
