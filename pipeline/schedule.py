"""A schedule: the compute actions of every rank, in order, as a frozen value."""

import csv
import io
from dataclasses import dataclass
from functools import cached_property

from pipeline.action import Action, ActionError


class ScheduleError(ValueError):
    """A schedule that cannot be built or breaks a law; the message lists everything found."""


@dataclass(frozen=True)
class Schedule:
    """What each rank computes, in order; sends and receives are added by ``pipeline.lower``.

    ``ranks[r]`` is rank r's list; an action's position in it is its slot. ``placement[s]`` is the rank of stage s.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def n_ranks(self) -> int:
        return len(self.ranks)

    @property
    def n_stages(self) -> int:
        return len(self.placement)

    @cached_property
    def _stages_by_rank(self) -> tuple[tuple[int, ...], ...]:
        owned: list[list[int]] = [[] for _ in self.ranks]
        for stage, rank in enumerate(self.placement):
            owned[rank].append(stage)
        return tuple(tuple(stages) for stages in owned)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that ``rank`` holds, in ascending order."""
        return self._stages_by_rank[rank]

    def to_csv(self) -> str:
        """One row per rank, one action per cell: torch's ``compute_only`` format."""
        return rows_to_csv(self.ranks)

    def __str__(self) -> str:
        rows = (" ".join(map(str, actions)) for actions in self.ranks)
        return "\n".join(f"rank {rank}: {row}" for rank, row in enumerate(rows))


def rows_to_csv(rows: tuple[tuple[Action, ...], ...]) -> str:
    """Rows of actions as comma-separated text, one line per row."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([map(str, row) for row in rows])
    return text.getvalue()


def schedule_from_csv(text: str, *, name: str = "csv") -> Schedule:
    """Read torch's ``compute_only`` format: a row per rank, an action per cell, blank cells for idle slots.

    Stages, microbatches and placement are read off the cells. Laws are not checked here (``pipeline.laws``), except
    what is needed to name them: every cell an action, every stage on one rank, stages 0..S-1 all present.
    """
    rows = [_parse_row(row, number) for number, row in enumerate(csv.reader(io.StringIO(text)), start=1)]
    placement = _placement_of(rows)
    microbatches = 1 + max(action.microbatch for row in rows for action in row)
    return Schedule(name, microbatches, placement, tuple(rows))


def _parse_row(cells: list[str], number: int) -> tuple[Action, ...]:
    actions = []
    for column, cell in enumerate(cells, start=1):
        if not cell.strip():
            continue
        try:
            actions.append(Action.parse(cell.strip()))
        except ActionError as error:
            raise ScheduleError(f"row {number}, column {column}: {error}") from None
    return tuple(actions)


def _placement_of(rows: list[tuple[Action, ...]]) -> tuple[int, ...]:
    owner: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            if owner.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"row {rank + 1}: {action} is stage {action.stage}, which row {owner[action.stage] + 1} has already"
                )
    missing = sorted(set(range(max(owner, default=-1) + 1)) - set(owner))
    if missing or not owner:
        raise ScheduleError(f"no row has an action of stage {missing[0]}" if missing else "there is no action at all")
    return tuple(owner[stage] for stage in range(len(owner)))
