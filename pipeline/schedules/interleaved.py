"""Interleaved 1F1B: V stages per rank, placed in a loop (Narayanan et al., arXiv 2104.04473)."""

from collections.abc import Sequence

from pipeline.action import Action, Kind
from pipeline.schedule import Schedule

Work = Sequence[tuple[int, int]]  # (stage, microbatch), in order


def interleaved(*, ranks: int, microbatches: int, virtual: int) -> Schedule:
    """Stage s on rank s mod P. Microbatches go round the loop in groups; V = 1 is 1F1B.

    A group crosses chunk 0 of every rank, then chunk 1, and so on (chunk v of rank r is stage v P + r); backwards
    take the chunks in descending order. The paper asks for M mod P = 0 and groups of P. Here M is any number: the
    groups are as even as possible and, where M >= P, none is smaller than P (torch's rule where M divides evenly), so
    a short last group never starves the loop. Rank r warms up with 2 (P-1-r) + (V-1) N forwards, N the largest group.

    Drawn for P = 2, V = 2, M = 4 (stage and microbatch; a forward is one cell, a backward two; rank 0 has stages 0
    and 2)::

        rank 0 | 0F0 0F1 2F0 2F1 0F2  .  2B0 2B0 0F3 2B1 2B1 2F2 0B0 0B0 2F3 0B1 0B1 2B2 2B2 ...
        rank 1 |  .  1F0 1F1 3F0 3B0 3B0 3F1 3B1 3B1 1F2 1B0 1B0 1F3 1B1 1B1 3F2 3B2 3B2 ...

    With groups of P the global bubble is (P-1)(T_F + T_B) in chunk time, a V-th of 1F1B's.
    """
    groups = _even_groups(microbatches, max(1, microbatches // ranks))

    def work(rank: int, chunks: Sequence[int]) -> Work:
        return [(chunk * ranks + rank, m) for group in groups for chunk in chunks for m in group]

    rows = tuple(
        warm_up_then_alternate(
            forwards=work(rank, range(virtual)),
            backwards=work(rank, range(virtual)[::-1]),
            warm_up=2 * (ranks - 1 - rank) + (virtual - 1) * len(groups[0]) if virtual > 1 else ranks - 1 - rank,
        )
        for rank in range(ranks)
    )
    placement = tuple(stage % ranks for stage in range(ranks * virtual))
    return Schedule("interleaved", microbatches, placement, rows)


def warm_up_then_alternate(*, forwards: Work, backwards: Work, warm_up: int) -> tuple[Action, ...]:
    """``warm_up`` forwards (or all, if fewer), then a forward and a backward in turn, then the remaining backwards."""
    warm_up = min(warm_up, len(forwards))
    ahead = [Action(stage, Kind.FORWARD, m) for stage, m in forwards]
    back = [Action(stage, Kind.BACKWARD, m) for stage, m in backwards]
    steady = [action for pair in zip(ahead[warm_up:], back, strict=False) for action in pair]
    return (*ahead[:warm_up], *steady, *back[len(ahead) - warm_up :])


def _even_groups(count: int, n_groups: int) -> list[range]:
    """0..count-1 in ``n_groups`` runs whose sizes differ by at most one, the larger first."""
    size, larger = divmod(count, n_groups)
    ends = [size * group + min(group, larger) for group in range(n_groups + 1)]
    return [range(start, end) for start, end in zip(ends, ends[1:], strict=False)]
