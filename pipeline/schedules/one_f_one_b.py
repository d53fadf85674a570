"""1F1B, also called PipeDream-flush (Narayanan et al., arXiv 2104.04473)."""

from pipeline.schedule import Schedule
from pipeline.schedules.interleaved import warm_up_then_alternate


def one_f_one_b(*, ranks: int, microbatches: int) -> Schedule:
    """Rank r: min(P-1-r, M) warm-up forwards, then one forward and one backward in turn, then the rest; any M >= 1.

    Drawn for P = 3, M = 4 (a forward is one cell, a backward two)::

        rank 0 | 0  1  2  .  .  .  . 0B 0B  3 1B 1B  . 2B 2B  . 3B 3B
        rank 1 | .  0  1  .  . 0B 0B  2 1B 1B  3 2B 2B  . 3B 3B  .  .
        rank 2 | .  .  0 0B 0B  1 1B 1B  2 2B 2B  3 3B 3B  .  .  .  .

    Global bubble (P-1)(T_F + T_B), as GPipe; at most min(P-r, M) activations on rank r.
    """
    rows = tuple(
        warm_up_then_alternate(
            forwards=[(rank, m) for m in range(microbatches)],
            backwards=[(rank, m) for m in range(microbatches)],
            warm_up=ranks - 1 - rank,
        )
        for rank in range(ranks)
    )
    return Schedule("1f1b", microbatches, tuple(range(ranks)), rows)
