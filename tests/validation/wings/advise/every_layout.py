"""All legal layouts of some devices, without anything of the search."""

from collections.abc import Iterator
from itertools import product

from pipeproof.wings.advise.cluster import Cluster
from pipeproof.wings.advise.layout import Job, Layout, Recompute, problems
from pipeproof.wings.advise.pipelined import OFFERED

_VIRTUAL = {"interleaved": (2, 4, 8), "zb-v": (2,), "v-half": (2,)}
LONG = 32_768  # tokens, from which on a sequence may be divided


def every_layout(job: Job, cluster: Cluster, *, micro: tuple[int, ...] = (1,)) -> Iterator[Layout]:
    """Every way to divide the devices, with every schedule, recompute and ZeRO stage."""
    sizes = range(1, cluster.devices + 1)
    for tp, cp, pp in product(range(1, cluster.per_node + 1), sizes if job.sequence >= LONG else (1,), sizes):
        dp, over = divmod(cluster.devices, tp * cp * pp)
        for ep, one, schedule in product(sizes, micro, OFFERED if pp > 1 else ("1f1b",)):
            for virtual, zero, again in product(_VIRTUAL.get(schedule, (1,)), range(4), Recompute):
                layout = Layout(tp, cp, pp, dp, ep, zero, again, schedule, virtual, one)
                if not over and dp and not any(problems(layout, job)):
                    yield layout
