"""Looped breadth-first: every microbatch crosses a chunk before any enters the next (Lamy-Poirier, arXiv 2211.05953).

Drawn for P = 2, V = 2, M = 3 (a forward is one cell, a backward two; rank 0 has stages 0 and 2)::

    rank 0 | 0F0 0F1 0F2 2F0 2F1 2F2   .   .   . 2B2 2B2 2B1 2B1 2B0 2B0 0B2 0B2 0B1 0B1 0B0 0B0
    rank 1 |   . 1F0 1F1 1F2 3F0 3F1 3F2 3B2 3B2 3B1 3B1 3B0 3B0 1B2 1B2 1B1 1B1 1B0 1B0   .   .
"""

from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.schedule import Schedule


def looped_bfs(*, ranks: int, microbatches: int, virtual: int) -> Schedule:
    """All forwards, chunk by chunk, then all backwards, last chunk and last microbatch first; stage s on rank s mod P.

    Any M >= 1. The global bubble is that of interleaved 1F1B, (P-1)(T_F + T_B) in chunk time; every rank holds V M
    activations of one chunk. Backwards in descending order of microbatches are torch's ``ScheduleLoopedBFS``.
    """

    def actions(rank: int) -> tuple[Action, ...]:
        work = [(chunk * ranks + rank, m) for chunk in range(virtual) for m in range(microbatches)]
        forwards = [Action(stage, Kind.FORWARD, m) for stage, m in work]
        return (*forwards, *(Action(stage, Kind.BACKWARD, m) for stage, m in reversed(work)))

    placement = tuple(stage % ranks for stage in range(ranks * virtual))
    return Schedule("looped-bfs", microbatches, placement, tuple(map(actions, range(ranks))))
