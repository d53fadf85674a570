"""A schedule drawn as text: a row per rank, a column per unit of time."""

from pipeline.schedule import Schedule, ScheduleError
from pipeline.simulate import Timeline, simulate


def grid(schedule: Schedule) -> str:
    """The schedule as drawn in the papers: F takes one cell and B two (I and W one each), a dot is an idle cell.

    A cell is an action as everywhere else, ``2F0``; the later cells of a long action repeat its name.
    """
    return draw(simulate(schedule))


def draw(timeline: Timeline) -> str:
    """``timeline`` on a grid of whole units of time. Raises ``ScheduleError`` where an action starts between two."""
    columns = round(timeline.makespan)
    rows = [["."] * columns for _ in timeline.schedule.ranks]
    for rank, actions in enumerate(timeline.schedule.ranks):
        for action, start, end in zip(actions, timeline.starts[rank], timeline.ends[rank], strict=True):
            if (start, end) != (round(start), round(end)):
                raise ScheduleError(f"cannot draw: {action} runs from {start} to {end}, which are not whole units")
            for column in range(round(start), round(end)):
                rows[rank][column] = str(action)
    width = max(len(cell) for row in rows for cell in row)
    label = len(str(len(rows) - 1))
    return "\n".join(
        f"rank {rank:>{label}} | " + " ".join(f"{cell:>{width}}" for cell in row) for rank, row in enumerate(rows)
    )
