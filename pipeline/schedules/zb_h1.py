"""ZB-H1: 1F1B with weight gradients put off into the bubble, in 1F1B's memory (Qi et al., arXiv 2401.10241).

Drawn for P = 3, V = 1, M = 4 (F, I and W are one cell each)::

    rank 0 | 0F0 0F1 0F2   .   . 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1 |   . 1F0 1F1   . 1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    rank 2 |   .   . 2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
"""

from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.schedules.interleaved import looped_work
from pipeproof.pipeline.schedules.one_f_one_b import Work


def zb_h1(*, ranks: int, microbatches: int, virtual: int) -> Schedule:
    """Rank r: P-1-r warm-up forwards, then F and I in turn; W of I_j comes once r newer I are done. Any M >= 1.

    With T_W <= T_I the local bubble is (P-1)(T_F + T_I - T_W) for M >= P, and rank r holds at most P-r activations
    and r between I and W. V > 1 is torch's ``ScheduleInterleavedZeroBubble``: stages and groups of microbatches as
    in interleaved 1F1B, and (V-1) N + P-1-r warm-up forwards.
    """
    forwards, backwards, group = looped_work(ranks, virtual=virtual, microbatches=microbatches)
    rows = tuple(
        put_off_weights(
            forwards=[(chunk * ranks + rank, m) for chunk, m in forwards],
            backwards=[(chunk * ranks + rank, m) for chunk, m in backwards],
            warm_up=(virtual - 1) * group + ranks - 1 - rank,
            lag=rank,
        )
        for rank in range(ranks)
    )
    return Schedule("zb-h1", microbatches, tuple(stage % ranks for stage in range(ranks * virtual)), rows)


def put_off_weights(*, forwards: Work, backwards: Work, warm_up: int, lag: int) -> tuple[Action, ...]:
    """``warm_up`` forwards (or all, if fewer), then in turn F, I, and the W for the I ``lag`` before."""
    warm_up = min(warm_up, len(forwards))
    ahead = [Action(stage, Kind.FORWARD, m) for stage, m in forwards]
    inputs = [Action(stage, Kind.BACKWARD_INPUT, m) for stage, m in backwards]
    weights = [Action(stage, Kind.BACKWARD_WEIGHT, m) for stage, m in backwards]
    row = ahead[:warm_up]
    for k, of_input in enumerate(inputs):
        row += [*ahead[warm_up + k : warm_up + k + 1], of_input]
        if k >= lag:
            row.append(weights[k - lag])
    return (*row, *weights[max(0, len(weights) - lag) :])
