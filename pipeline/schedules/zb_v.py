"""ZB-V: zero bubble in 1F1B's memory, over a V (Qi et al., arXiv 2401.10241).

Drawn for P = 2, M = 4 (F, I and W are one cell each; rank 0 has stages 0 and 3)::

    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3   .
    rank 1 |   . 1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
"""

from pipeproof.pipeline.action import Action
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.schedules.vee import Row, below, placement


def zb_v(*, ranks: int, microbatches: int) -> Schedule:
    """Two stages per rank, in a V. At equal times no local bubble for M >= 2P-1; every rank holds 2P chunk activations.

    Any M >= 1: below 2P-1 it is the schedule for 2P-1 without the microbatches that are not there, as torch's
    ``ScheduleZBVZeroBubble``, and the local bubble is 2 (2P-1-M) units.
    """
    full = max(2 * ranks - 1, microbatches)

    def actions(rank: int) -> tuple[Action, ...]:
        row = Row(rank, ranks)
        row.run("F0", 2 * (ranks - rank) - 1)
        row.run("F1 F0", rank)
        row.run("F1 I1 W1", ranks - rank)
        row.run("F0 I0 W0 F1 I1 W1", full - (2 * ranks - 1) + rank)
        row.run("I0 W0 F1 I1 W1", ranks - 1 - rank)
        row.run("I0 I1", rank)
        row.run("I0 W0", ranks - rank)
        row.run("W1", rank)
        row.run("W0", rank)
        return tuple(below(microbatches, row.actions))

    return Schedule("zb-v", microbatches, placement(ranks), tuple(map(actions, range(ranks))))
