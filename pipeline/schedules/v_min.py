"""V-Min: the least memory, a third of 1F1B's, over a V (Qi et al., arXiv 2405.15362).

Drawn for P = 2, M = 4 (F, I and W are one cell each; rank 0 has stages 0 and 3)::

    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0I0 0W0 3I1 3W1 0F3 0I1 0W1 3F2 3I2 3W2   . 0I2 0W2 3F3 3I3 3W3   . 0I3 0W3
    rank 1 |   . 1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 1F2 2I1 1I1 2F2 2W1 1W1 1F3 2I2 1I2 2F3 2W2 1W2   . 2I3 1I3 2W3 1W3
"""

from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.schedules.building_block import Block, repeat_block


def v_min(*, ranks: int, microbatches: int) -> Schedule:
    """Two stages per rank, in a V; ranks hold up to 2 floor((P+4)/3) chunk activations. Any M >= 1.

    The bubble is about two thirds of 1F1B's at equal times and grows with M at others. The block is that of the
    authors' ``zbv_greedy.py``, delays included; how the ends are filled is our own.
    """
    delay = 0 if ranks % 3 else 2

    def block(rank: int) -> Block:
        return rank, 2 * ranks - 1 - rank, 2 * ranks + delay + rank, 4 * ranks + delay - 1 - rank

    return repeat_block("v-min", block, ranks=ranks, microbatches=microbatches)
