"""1F1B, also called PipeDream-flush (Narayanan et al., arXiv 2104.04473).

Drawn for P = 3, M = 4 (a forward is one cell, a backward two)::

    rank 0 | 0F0 0F1 0F2   .   .   .   . 0B0 0B0 0F3 0B1 0B1   . 0B2 0B2   . 0B3 0B3
    rank 1 |   . 1F0 1F1   .   . 1B0 1B0 1F2 1B1 1B1 1F3 1B2 1B2   . 1B3 1B3   .   .
    rank 2 |   .   . 2F0 2B0 2B0 2F1 2B1 2B1 2F2 2B2 2B2 2F3 2B3 2B3   .   .   .   .
"""

from collections.abc import Sequence

from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.schedule import Schedule

Work = Sequence[tuple[int, int]]  # (stage, microbatch), in order


def one_f_one_b(*, ranks: int, microbatches: int) -> Schedule:
    """Rank r: P-1-r warm-up forwards, or all M if fewer, then a forward and a backward in turn, then the rest.

    Stage r on rank r; any M >= 1. Global bubble (P-1)(T_F + T_B), as GPipe; rank r holds at most min(P-r, M)
    activations.
    """
    rows = []
    for rank in range(ranks):
        work = [(rank, m) for m in range(microbatches)]
        rows.append(warm_up_then_alternate(forwards=work, backwards=work, warm_up=ranks - 1 - rank))
    return Schedule("1f1b", microbatches, tuple(range(ranks)), tuple(rows))


def warm_up_then_alternate(*, forwards: Work, backwards: Work, warm_up: int) -> tuple[Action, ...]:
    """``warm_up`` forwards (or all, if fewer), then a forward and a backward in turn, then the remaining backwards."""
    warm_up = min(warm_up, len(forwards))
    ahead = [Action(stage, Kind.FORWARD, m) for stage, m in forwards]
    back = [Action(stage, Kind.BACKWARD, m) for stage, m in backwards]
    steady = [action for pair in zip(ahead[warm_up:], back, strict=False) for action in pair]
    return (*ahead[:warm_up], *steady, *back[len(ahead) - warm_up :])
