"""Naive (stop-and-wait): one microbatch in flight, so one rank works at a time.

Drawn for P = 3, M = 2 (a forward is one cell, a backward two)::

    rank 0 | 0F0   .   .   .   .   .   . 0B0 0B0 0F1   .   .   .   .   .   . 0B1 0B1
    rank 1 |   . 1F0   .   .   . 1B0 1B0   .   .   . 1F1   .   .   . 1B1 1B1   .   .
    rank 2 |   .   . 2F0 2B0 2B0   .   .   .   .   .   . 2F1 2B1 2B1   .   .   .   .
"""

from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.schedule import Schedule


def naive(*, ranks: int, microbatches: int) -> Schedule:
    """Each rank: F0 B0 F1 B1 ...; stage r on rank r.

    Global bubble (P-1) M (T_F + T_B): the baseline that every other schedule improves on.
    """

    def actions(stage: int) -> tuple[Action, ...]:
        pairs = ((Action(stage, Kind.FORWARD, m), Action(stage, Kind.BACKWARD, m)) for m in range(microbatches))
        return tuple(action for pair in pairs for action in pair)

    return Schedule("naive", microbatches, tuple(range(ranks)), tuple(actions(stage) for stage in range(ranks)))
