"""A program's buffers besides activations: the life of each, and how many live at once."""

from collections.abc import Mapping

import numpy as np

from pipeproof.pipeline.action import WAITS, Kind
from pipeproof.pipeline.columns import Columns, Ints
from pipeproof.pipeline.memory import Peak
from pipeproof.pipeline.messages import Messages, consumers
from pipeproof.pipeline.program import Program

RECEIVED, SENT, WEIGHTS = "receive buffers", "send buffers", "weight-gradient inputs"


def buffer_peaks(program: Program) -> Mapping[str, tuple[Peak, ...]]:
    """The most buffers of every kind on each rank at once, and where.

    A receive buffer lives from its post to the end of its use; a send buffer from the send to its wait, or to the end
    of the step without one; a weight-gradient input from I to W.
    """
    columns, messages = program.columns, Messages.of(program)
    users = consumers(program, messages)
    lasting = columns.bounds[columns.rank + 1] - 1  # the last entry of every entry's row
    waits = np.flatnonzero(columns.is_kind(*WAITS) & (messages.key >= 0))
    waited = np.full(int(messages.key.max(initial=-1)) + 1, -1)
    waited[messages.key[waits]] = waits
    freed = waited[messages.key[messages.sends]]
    inputs, weights = _split(columns)
    return {
        RECEIVED: _most(columns, messages.receives, np.where(users < 0, lasting[messages.receives], users)),
        SENT: _most(columns, messages.sends, np.where(freed < 0, lasting[messages.sends], freed)),
        WEIGHTS: _most(columns, inputs, weights),
    }


def _split(columns: Columns) -> tuple[Ints, Ints]:
    """Pair every I with a W, if present."""
    sides = []
    for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT):
        entries = np.flatnonzero(columns.is_kind(kind))
        names = (columns.stage[entries].astype(np.int64) << 32) + columns.microbatch[entries]
        unique, first = np.unique(names, return_index=True)
        sides.append((unique, entries[first]))
    _, one, other = np.intersect1d(sides[0][0], sides[1][0], assume_unique=True, return_indices=True)
    return sides[0][1][one], sides[1][1][other]


def _most(columns: Columns, born: Ints, last: Ints) -> tuple[Peak, ...]:
    """Peaks per rank of living buffers, each from entry ``born`` to entry ``last``, both included."""
    change = np.bincount(born, minlength=len(columns) + 1) - np.bincount(last + 1, minlength=len(columns) + 1)
    alive = np.cumsum(change)
    found = []
    for start, end in columns.spans():
        slot = int(alive[start:end].argmax()) if end > start else -1
        found.append(Peak(float(alive[start + slot]), slot) if slot >= 0 else Peak(0.0, -1))
    return tuple(found)
