"""A rank's memory: activations from forward to backward, and inputs kept for the weight gradient."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from pipeproof.pipeline.action import Kind
from pipeproof.pipeline.columns import KINDS, Columns, Floats


class Peak(NamedTuple):
    """The most that a rank holds at once, and the first slot that starts with it; slot -1 for nothing."""

    value: float
    slot: int


def memory_held(columns: Columns, *, weight_memory: float = 1.0, sizes: Sequence[float] = ()) -> Floats:
    """Compute a rank's memory as each entry starts: M_B from F to I or B, M_W from I to W.

    M_B is 1, or ``sizes[stage]``; M_W is ``weight_memory`` M_B. An action needs what it frees until its end, so what a
    backward frees still counts in its own entry.
    """
    grows = {Kind.FORWARD: 1.0}
    frees = {Kind.BACKWARD: 1.0, Kind.BACKWARD_INPUT: 1.0 - weight_memory, Kind.BACKWARD_WEIGHT: weight_memory}
    of_stage = np.array(sizes)[columns.stage] if len(sizes) else 1.0
    taken, given = (
        np.array([by_kind.get(kind, 0.0) for kind in KINDS])[columns.kind] * of_stage for by_kind in (grows, frees)
    )
    values = np.zeros(len(columns))
    for start, end in columns.spans():
        values[start:end] = np.cumsum(taken[start:end] - given[start:end]) + given[start:end]
    return values


def peaks_of(columns: Columns, *, weight_memory: float = 1.0, sizes: Sequence[float] = ()) -> tuple[Peak, ...]:
    """Peak memory per rank."""
    values = memory_held(columns, weight_memory=weight_memory, sizes=sizes)
    found = []
    for start, end in columns.spans():
        slot = int(values[start:end].argmax()) if end > start else -1
        found.append(Peak(float(values[start + slot]), slot) if slot >= 0 else Peak(0.0, -1))
    return tuple(found)
