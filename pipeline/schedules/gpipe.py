"""GPipe: all forwards, then all backwards, drained in reverse (Huang et al., arXiv 1811.06965).

Drawn for P = 3, M = 3 (a forward is one cell, a backward two)::

    rank 0 | 0F0 0F1 0F2   .   .   .   .   .   . 0B2 0B2 0B1 0B1 0B0 0B0
    rank 1 |   . 1F0 1F1 1F2   .   .   . 1B2 1B2 1B1 1B1 1B0 1B0   .   .
    rank 2 |   .   . 2F0 2F1 2F2 2B2 2B2 2B1 2B1 2B0 2B0   .   .   .   .
"""

from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.schedule import Schedule


def gpipe(*, ranks: int, microbatches: int) -> Schedule:
    """Each rank: F0 .. F(M-1), then B(M-1) .. B0; stage r on rank r.

    Global bubble (P-1)(T_F + T_B); every rank holds M activations at its peak. The last microbatch's backward comes
    first because its activations are the freshest; torch's GPipe drains in index order instead.
    """

    def actions(stage: int) -> tuple[Action, ...]:
        forwards = tuple(Action(stage, Kind.FORWARD, m) for m in range(microbatches))
        backwards = tuple(Action(stage, Kind.BACKWARD, m) for m in reversed(range(microbatches)))
        return forwards + backwards

    return Schedule("gpipe", microbatches, tuple(range(ranks)), tuple(actions(stage) for stage in range(ranks)))
