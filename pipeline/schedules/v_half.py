"""V-Half: half of 1F1B's memory and about half of its bubble, over a V (Qi et al., arXiv 2405.15362).

Drawn for P = 2, M = 4 (F, I and W are one cell each; rank 0 has stages 0 and 3)::

    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 0W0 3W1 3F2 0F3 3I2 0I1 0W1 3W2 3F3 3I3 0I2 0W2 0I3 3W3 0W3   .
    rank 1 |   . 1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 1F2 2F2 2I1 2W1 1I1 1W1 1F3 2F3 2I2 1I2 2I3 1I3 2W2 1W2 2W3 1W3
"""

from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.schedules.building_block import Block, repeat_block


def v_half(*, ranks: int, microbatches: int) -> Schedule:
    """Two stages per rank, in a V; ranks hold up to 2 floor((P+2)/2) chunk activations. Any M >= 1.

    The block is that of the authors' ``zbv_greedy.py``, delays included; how the ends are filled is our own.
    """
    delay = 0 if ranks % 2 else 3

    def block(rank: int) -> Block:
        return 2 * rank, 3 * ranks - 2 - rank, 3 * ranks + delay - 1 + 2 * rank, 6 * ranks + delay - 2 - rank

    return repeat_block("v-half", block, ranks=ranks, microbatches=microbatches)
