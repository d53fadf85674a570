"""Dependencies between actions: edges between stages."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipeproof.pipeline.action import GIVES_INPUT_GRADIENT, Action, Kind
from pipeproof.pipeline.columns import Columns, Ints, Mask
from pipeproof.pipeline.graph import Graph
from pipeproof.pipeline.schedule import ScheduleError


class Product(NamedTuple):
    """An action's product for a neighbouring stage: ``stage``'s output (F) or input gradient (I), per microbatch."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        what = "output" if self.kind is Kind.FORWARD else "input gradient"
        return f"stage {self.stage}'s {what} of microbatch {self.microbatch}"


def product_of(action: Action) -> Product | None:
    """Return the product of ``action`` for other stages; None for a weight-gradient backward and for messages."""
    if action.kind is Kind.FORWARD:
        return Product(action.stage, Kind.FORWARD, action.microbatch)
    if action.kind in GIVES_INPUT_GRADIENT:
        return Product(action.stage, Kind.BACKWARD_INPUT, action.microbatch)
    return None


def need_of(action: Action, n_stages: int) -> Product | None:
    """Return the product that ``action`` needs from a neighbouring stage; None if the stage can start alone.

    A forward needs the previous stage's output. A backward (full, or with respect to the input) needs the next
    stage's input gradient; on the last stage it starts from the stage's own loss.
    """
    stage, kind, microbatch = action
    if kind is Kind.FORWARD:
        return Product(stage - 1, Kind.FORWARD, microbatch) if stage > 0 else None
    if kind in GIVES_INPUT_GRADIENT and stage < n_stages - 1:
        return Product(stage + 1, Kind.BACKWARD_INPUT, microbatch)
    return None


NONE, NEVER = -1, -2  # an entry without needs, and one with a need that no entry makes


def suppliers(columns: Columns, n_stages: int) -> Ints:
    """For every entry, the entry that makes its need (``need_of``, for all at once), or ``NONE`` or ``NEVER``.

    The first of several makers counts, though no lawful schedule has two.
    """
    stage = columns.stage.astype(np.int64)
    microbatch, width = _number(columns.microbatch)
    forward, backward = columns.is_kind(Kind.FORWARD), columns.is_kind(*GIVES_INPUT_GRADIENT)
    source = stage + np.where(forward, -1, 1)
    needs = (forward & (stage > 0)) | (backward & (stage < n_stages - 1))
    needs_made = needs & (source >= 0) & (source < n_stages)
    makes = np.flatnonzero((forward | backward) & (stage >= 0) & (stage < n_stages))[::-1]

    def product(entries: Ints | Mask, stages: Ints) -> Ints:
        half = np.where(backward[entries], n_stages, 0)
        return (half + stages[entries]) * width + microbatch[entries]

    maker = np.full(2 * n_stages * width, NEVER)
    maker[product(makes, stage)] = makes  # of several that are equal, numpy keeps the last, here the first entry
    supplier = np.where(needs, NEVER, NONE)
    supplier[needs_made] = maker[product(needs_made, source)]
    return supplier


def _number(microbatch: Ints) -> tuple[Ints, int]:
    """Renumber microbatches below a bound near their count, keeping equality."""
    if len(microbatch) and (microbatch.min() < 0 or microbatch.max() >= len(microbatch)):
        _, microbatch = np.unique(microbatch, return_inverse=True)
    return microbatch.astype(np.int64), int(microbatch.max(initial=-1)) + 1


def flow(columns: Columns, supplier: Ints, *, node: Ints | None = None) -> Graph:
    """Build the graph of a rank's order and of needs: cycles are contradictions.

    ``node``: each entry's node, for entries that run as one (default: each its own).
    """
    node = np.arange(len(columns)) if node is None else node
    in_row = np.flatnonzero(columns.rank[:-1] == columns.rank[1:])
    in_row = in_row[node[in_row] != node[in_row + 1]]
    across = np.flatnonzero(supplier >= 0)
    lost = np.flatnonzero(supplier == NEVER)  # waits for itself, so that neither it nor its successors ever come
    before, after = np.concatenate([in_row, supplier[across], lost]), np.concatenate([in_row + 1, across, lost])
    return Graph(len(columns), node[before], node[after])


class Stuck(ScheduleError):
    """No rank can go on: ``waits`` holds, per stuck rank, its next action and that action's need."""

    def __init__(self, waits: Sequence[tuple[int, Action, Product]]) -> None:
        lines = (f"rank {rank} waits at {action} for {need}" for rank, action, need in waits)
        super().__init__("no rank can go on: " + "; ".join(lines))
        self.waits = tuple(waits)


def stuck(columns: Columns, supplier: Ints, n_stages: int, reached: Mask) -> Stuck:
    """Locate each rank's halt, given the ``reached`` entries."""
    left = np.flatnonzero(~reached)
    needed = supplier[left]
    lacks = left[(needed == NEVER) | ((needed >= 0) & ~reached[np.maximum(needed, 0)])]
    _, first = np.unique(columns.rank[lacks], return_index=True)
    waits = []
    for entry in lacks[first].tolist():
        action = columns.action(entry)
        need = need_of(action, n_stages)
        assert need is not None, f"{action} needs nothing, so its rank is not stuck there"
        waits.append((int(columns.rank[entry]), action, need))
    return Stuck(waits)
