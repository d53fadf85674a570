"""Rows of actions as arrays, with an entry per action, row after row: for laws and the simulator."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain, pairwise
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeproof.pipeline.action import Action, Kind

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

KINDS = tuple(Kind)
CODE = {kind: code for code, kind in enumerate(KINDS)}
_INT = np.int32  # a number of a cell has at most nine digits


@dataclass(frozen=True, eq=False)
class Columns:
    """Entry i is action ``stage[i] kind[i] microbatch[i]``; ``kind`` holds positions in ``KINDS``.

    Row r is the entries ``bounds[r]`` to ``bounds[r + 1]``, and ``rank[i]`` is the row of entry i.
    """

    rank: NDArray[Any]
    stage: NDArray[Any]
    kind: NDArray[Any]
    microbatch: NDArray[Any]
    bounds: Ints

    @classmethod
    def of(cls, rows: Sequence[Sequence[Action]]) -> "Columns":
        """Build columns from ``rows``; ``rows()`` inverts it."""
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        count = int(lengths.sum())

        def column(field: int) -> Iterator[Any]:
            return map(itemgetter(field), chain.from_iterable(rows))

        return cls(
            np.repeat(np.arange(len(rows), dtype=_INT), lengths),
            np.fromiter(column(0), _INT, count),
            np.fromiter(map(CODE.__getitem__, column(1)), np.int8, count),
            np.fromiter(column(2), _INT, count),
            np.concatenate([[0], np.cumsum(lengths)]),
        )

    def rows(self) -> tuple[tuple[Action, ...], ...]:
        """Convert every row to actions."""
        return tuple(tuple(self._actions(start, end)) for start, end in self.spans())

    def spans(self) -> Iterator[tuple[int, int]]:
        """First and end entry of each row."""
        bounds = self.bounds.tolist()
        return pairwise(bounds)

    def take(self, order: NDArray[Any]) -> "Columns":
        """Select entries ``order`` (indices or a mask), sorted by rank."""
        rank = self.rank[order]
        bounds = np.searchsorted(rank, np.arange(len(self.bounds)))
        return Columns(rank, self.stage[order], self.kind[order], self.microbatch[order], bounds)

    def is_kind(self, *kinds: Kind) -> Mask:
        """Mask actions by kind."""
        wanted = np.zeros(len(KINDS), dtype=bool)
        wanted[[CODE[kind] for kind in kinds]] = True
        found: Mask = wanted[self.kind]
        return found

    def action(self, entry: int) -> Action:
        """Convert entry ``entry`` to an action."""
        return next(self._actions(entry, entry + 1))

    def cell(self, entry: int) -> tuple[int, int]:
        """Rank and slot of entry ``entry``."""
        rank = int(self.rank[entry])
        return rank, entry - int(self.bounds[rank])

    def _actions(self, start: int, end: int) -> Iterator[Action]:
        kinds = map(KINDS.__getitem__, self.kind[start:end].tolist())
        return map(Action, self.stage[start:end].tolist(), kinds, self.microbatch[start:end].tolist())

    def __len__(self) -> int:
        return len(self.stage)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Columns):
            return NotImplemented
        return all(np.array_equal(getattr(self, field.name), getattr(other, field.name)) for field in fields(self))

    def __hash__(self) -> int:
        return hash((self.stage.tobytes(), self.kind.tobytes(), self.microbatch.tobytes()))
