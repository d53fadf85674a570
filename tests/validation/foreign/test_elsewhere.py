"""Of a hang on simulated ranks the verdict says where else it happens, and where it may be none."""

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from pipeproof.core.verdict import Verdict
from pipeproof.foreign.elsewhere import told_of_transports
from pipeproof.pipeline.transports import Transport
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.golden import golden


def sums_in_backward(context: RankContext) -> None:
    """Rank 1 comes to the backward once rank 0 has left it."""
    store, weight = c10d._get_default_store(), torch.ones(1, requires_grad=True)
    if context.rank:
        store.wait(["left"])
    (output := weight * 2).register_hook(lambda grad: (dist.all_reduce(grad), grad)[1])
    output.backward()
    store.set("left", "")


def test_a_hang_that_may_be_none_where_programs_go_on_says_so(simulated: World) -> None:
    told = {}
    for simulated.transport in (Transport.PAIR, Transport.STRICT):
        try:
            simulated.run(sums_in_backward, ranks=2)
        except RankFailed as failure:
            verdict = Verdict("case", "unknown", "none", ()).of_failure(failure)
            told[simulated.transport] = told_of_transports(verdict, simulated).headline
    golden("\n".join(f"{transport.value}: {headline}" for transport, headline in told.items()))
