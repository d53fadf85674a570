"""Interleaved 1F1B: V stages per rank, placed in a loop (Narayanan et al., arXiv 2104.04473).

Drawn for P = 2, V = 2, M = 4 (a forward is one cell, a backward two; rank 0 has stages 0 and 2)::

    rank 0 | 0F0 0F1 2F0 2F1 0F2   . 2B0 2B0 0F3 2B1 2B1 2F2 0B0 0B0 2F3 0B1 0B1   . 2B2 2B2   . 2B3 2B3 0B2 0B2 0B3 0B3
    rank 1 |   . 1F0 1F1 3F0 3B0 3B0 3F1 3B1 3B1 1F2 1B0 1B0 1F3 1B1 1B1 3F2 3B2 3B2 3F3 3B3 3B3 1B2 1B2 1B3 1B3   .   .
"""

from itertools import pairwise

from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.schedules.one_f_one_b import Work, warm_up_then_alternate


def interleaved(*, ranks: int, microbatches: int, virtual: int) -> Schedule:
    """Stage s on rank s mod P: chunk v of rank r is stage v P + r. Any M >= 1; V = 1 is 1F1B.

    Microbatches go round the loop in groups. A group crosses chunk 0 of every rank, then chunk 1, and so on;
    backwards take the chunks in descending order. Rank r warms up with 2 (P-1-r) + (V-1) N forwards, where N is the
    size of the largest group. The paper asks for M mod P = 0 and groups of P; here groups are as even as can be with
    none below P (torch's rule where that divides M), because a short group starves the loop or cannot run at all.

    For every M >= P the global bubble is (P-1)(T_F + T_B) in chunk time, a V-th of 1F1B's. Rank r holds at most
    min(V M, (V-1) N + 2 (P-1-r) + 1) activations of one chunk.
    """
    ascending, descending, group = looped_work(ranks, virtual=virtual, microbatches=microbatches)
    rows = []
    for rank in range(ranks):
        ahead = ranks - 1 - rank
        rows.append(
            warm_up_then_alternate(
                forwards=[(chunk * ranks + rank, m) for chunk, m in ascending],
                backwards=[(chunk * ranks + rank, m) for chunk, m in descending],
                warm_up=2 * ahead + (virtual - 1) * group if virtual > 1 else ahead,
            )
        )
    placement = tuple(stage % ranks for stage in range(ranks * virtual))
    return Schedule("interleaved", microbatches, placement, tuple(rows))


def looped_work(ranks: int, *, virtual: int, microbatches: int) -> tuple[Work, Work, int]:
    """(chunk, microbatch) of a rank's forwards and backwards, in order, and the size N of the largest group."""
    groups = _even_groups(microbatches, max(1, microbatches // ranks))
    ascending = [(chunk, m) for group in groups for chunk in range(virtual) for m in group]
    descending = [(chunk, m) for group in groups for chunk in reversed(range(virtual)) for m in group]
    return ascending, descending, len(groups[0])


def _even_groups(count: int, n_groups: int) -> list[range]:
    """Cut 0..count-1 into ``n_groups`` runs with sizes differing by at most one, larger first."""
    size, larger = divmod(count, n_groups)
    ends = [size * group + min(group, larger) for group in range(n_groups + 1)]
    return [range(start, end) for start, end in pairwise(ends)]
