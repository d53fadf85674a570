"""ZB-H2: ZB-H1 with twice the warm-up and twice the lag, so that no rank idles (Qi et al., arXiv 2401.10241).

Drawn for P = 3, M = 5 (F, I and W are one cell each)::

    rank 0 | 0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4   .   .
    rank 1 |   . 1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1W1 1I4 1W2 1W3 1W4   .
    rank 2 |   .   . 2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4
"""

from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.schedules.zb_h1 import put_off_weights


def zb_h2(*, ranks: int, microbatches: int) -> Schedule:
    """Rank r: 2 (P-1-r) warm-up forwards, then F and I in turn; W of I_j comes once 2r newer I are done. Any M >= 1.

    The paper's hand-made form. With T_W <= T_I the local bubble is (P-1)(T_F + T_I - 2 T_W) for M >= 2P-1, none at
    equal times, and 2P-1-M units for P <= M <= 2P-1; every rank holds up to 2P-1 activations.
    """
    work = [[(rank, m) for m in range(microbatches)] for rank in range(ranks)]
    rows = tuple(
        put_off_weights(forwards=work[rank], backwards=work[rank], warm_up=2 * (ranks - 1 - rank), lag=2 * rank)
        for rank in range(ranks)
    )
    return Schedule("zb-h2", microbatches, tuple(range(ranks)), rows)
