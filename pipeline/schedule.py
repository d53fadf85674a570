"""A schedule: compute actions of every rank, in order, as a frozen value."""

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeproof.pipeline.action import Action, ShardAction
from pipeproof.pipeline.action import ScheduleError as ScheduleError
from pipeproof.pipeline.cells import Cells, read_cells, write_cells
from pipeproof.pipeline.columns import Columns, Ints
from pipeproof.pipeline.sizes import some


@dataclass(frozen=True)
class Schedule:
    """Each rank's computation, in order; ``pipeproof.pipeline.program`` adds sends and receives.

    ``ranks[r]`` is rank r's list; an action's position in it is its slot. ``placement[s]`` is the rank of stage s.
    ``overlaps``: (rank, slot) of forwards that run together with the backward after them, as one action: both start
    when both can, and their products leave when both have ended (torch's ``OVERLAP_F_B``). ``shard_actions``: when
    stages' parameters are gathered and their gradients reduced, if the schedule says so, in each rank's order. Our
    runtime does not run them.
    """

    name: str
    microbatches: int
    placement: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]
    overlaps: tuple[tuple[int, int], ...] = ()
    shard_actions: tuple[ShardAction, ...] = ()

    @property
    def n_ranks(self) -> int:
        return len(self.ranks)

    @property
    def n_stages(self) -> int:
        return len(self.placement)

    @property
    def sizes(self) -> str:
        """P, S and M in words."""
        counts = {"rank": self.n_ranks, "stage": self.n_stages, "microbatch": self.microbatches}
        return ", ".join(some(count, what) for what, count in counts.items())

    @cached_property
    def columns(self) -> Columns:
        """Convert ``ranks`` to arrays."""
        return Columns.of(self.ranks)

    @cached_property
    def nodes(self) -> Ints:
        """For every entry of ``columns``, itself, or the entry before it if they overlap."""
        nodes = np.arange(len(self.columns))
        for rank, slot in self.overlaps:
            nodes[self.columns.bounds[rank] + slot + 1] -= 1
        return nodes

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Stages on ``rank``, in ascending order."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def to_csv(self) -> str:
        """One row per rank, one action per cell: torch's ``compute_only`` format."""
        return write_cells(Cells(self.ranks, self.overlaps, self.shard_actions))

    def __str__(self) -> str:
        rows = (" ".join(map(str, actions)) for actions in self.ranks)
        return "\n".join(f"rank {rank}: {row}" for rank, row in enumerate(rows))


def schedule_from_csv(text: str, *, name: str = "csv") -> Schedule:
    """Read torch's ``compute_only`` format: a row per rank, an action per cell, blank cells for idle slots.

    Stages, microbatches and placement come from the cells. Laws are not checked here (``check`` does), except for the
    naming: every cell an action, something in every row, every stage on one rank, stages 0..S-1 and microbatches 0..M-1
    all present. Empty lines at the end are no rows. Raises ``ScheduleError``.
    """
    return schedule_of(read_cells(text), name=name)


def schedule_of(cells: Cells, *, name: str) -> Schedule:
    """Build a schedule from compute actions, with their placement and microbatches. Raises ``ScheduleError``."""
    microbatches = _count({action.microbatch for row in cells.rows for action in row}, "microbatch")
    owner: dict[int, int] = {}
    for rank, row in enumerate(cells.rows):
        for action in row:
            if owner.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"row {rank + 1}: {action} is stage {action.stage}, which row {owner[action.stage] + 1} has already"
                )
    placement = tuple(owner[stage] for stage in range(_count(owner.keys(), "stage")))
    return Schedule(name, microbatches, placement, cells.rows, cells.overlaps, cells.shard_actions)


def _count(numbers: Collection[int], what: str) -> int:
    """Count ``numbers``; raise unless they run 0, 1, 2 and so on without a gap."""
    missing = next((number for number in range(len(numbers)) if number not in numbers), None)
    if missing is not None:
        raise ScheduleError(f"no row has an action of {what} {missing}, but one has of {what} {max(numbers)}")
    return len(numbers)
