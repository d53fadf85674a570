"""What a world makes of its runs: of one that fails the preemptions that it needs, of a hang where else it happens."""

import os
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store as store

from pipeproof.core.verdict import Verdict
from pipeproof.pipeline.transports import Transport
from pipeproof.wings.simulated import SimulatedWorld
from pipeproof.wings.simulated.engine.decisions import Guide
from pipeproof.worlds.rank_report import RankFailed, of_failure
from pipeproof.worlds.worker import RankContext
from tests.support.golden import golden


def overwrites(context: RankContext) -> None:
    """Wrong where the first message moves after the second one, which says that rank 1 is there."""
    buffer = torch.zeros(2)
    if context.rank == 0:
        work: Any = dist.isend(buffer, 1, tag=1)
        dist.recv(torch.zeros(1), 1, tag=2)
        buffer += 1
        work.wait()
    else:
        work = dist.irecv(buffer, 0, tag=1)
        dist.send(torch.zeros(1), 0, tag=2)
        work.wait()
    for _ in range(4):
        dist.barrier()


def fails(world: SimulatedWorld) -> bool:
    try:
        world.run(overwrites, ranks=2)
    except RankFailed:
        return True
    return False


def test_few_preemptions_are_left(simulated: SimulatedWorld) -> None:
    for simulated.seed in range(20):
        if fails(simulated):
            break
    simulated.reduce(lambda: fails(simulated))
    assert isinstance(simulated.seed, Guide)
    assert len(simulated.seed.preemptions) <= 1
    assert fails(simulated)
    simulated.seed = Guide()
    assert not fails(simulated), "in turn it passes: it takes a preemption"


@pytest.mark.parametrize(("again", "seed"), [(False, 3), (True, Guide())])
def test_what_never_or_always_fails(again: bool, seed: int | Guide, simulated: SimulatedWorld) -> None:
    simulated.seed = 3

    def run_and_fail() -> bool:
        fails(simulated)
        return again

    simulated.reduce(run_and_fail)
    assert simulated.seed == seed


def sums_in_backward(context: RankContext) -> None:
    """Rank 1 comes to the backward once rank 0 has left it."""
    weight = torch.ones(1, requires_grad=True)
    if context.rank:
        store().wait(["left"])
    (output := weight * 2).register_hook(lambda grad: (dist.all_reduce(grad), grad)[1])
    output.backward()
    store().set("left", "")


def test_a_hang_that_may_be_none_where_programs_go_on_says_so(simulated: SimulatedWorld) -> None:
    told = {}
    for simulated.transport in (Transport.PAIR, Transport.STRICT):
        try:
            simulated.run(sums_in_backward, ranks=2)
        except RankFailed as failure:
            verdict = of_failure(Verdict("case", "unknown", "none", ()), failure)
            told[simulated.transport] = simulated.complete(verdict).headline
    golden("\n".join(f"{transport.value}: {headline}" for transport, headline in told.items()))


def passes_on_and_tells(context: RankContext) -> None:
    """Rank 1 says that it has asked for a message once it has also computed with that, and passed it on."""
    buffer = torch.zeros(1)
    if context.rank == 0:
        store().wait(["go"])
        dist.send(torch.ones(1), 1)
    elif context.rank == 1:
        dist.recv(buffer, 0)
        buffer = buffer * 2 + 1
        dist.send(buffer, 2)
        buffer.mul_(10)
        store().set("go", "")
    else:
        dist.recv(buffer, 1)


def receives_and_meets(context: RankContext, backend: str, bound: timedelta | None = None) -> None:
    """Rank 1 sends once rank 0 has come to a barrier; rank 0 does that after its receive."""
    group = dist.new_group(backend=backend)
    if context.rank:
        dist.barrier(group=group)
        dist.send(torch.ones(1), 0)
        return
    work: Any = dist.irecv(torch.zeros(1), 1)
    work.wait(*([] if bound is None else [bound]))
    dist.barrier(group=group)


def both_send_first(context: RankContext) -> None:
    dist.send(torch.ones(1), 1 - context.rank)
    dist.recv(torch.empty(1), 1 - context.rank)


def asks_nccl_to_block(context: RankContext) -> None:
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    dist.recv(torch.zeros(1), 1, group=dist.new_group()) if context.rank == 0 else store().wait(["go"])


@pytest.mark.parametrize(
    ("job", "transport", "may_end"),
    [
        (passes_on_and_tells, Transport.PAIR, True),
        (passes_on_and_tells, Transport.UNLIMITED, False),
        (partial(receives_and_meets, backend="gloo"), Transport.RANK, True),
        (partial(receives_and_meets, backend="nccl"), Transport.PAIR, False),
        (partial(receives_and_meets, backend="gloo", bound=timedelta(seconds=5)), Transport.PAIR, False),
        (both_send_first, Transport.PAIR, False),
        (asks_nccl_to_block, Transport.PAIR, False),
    ],
)
def test_which_hangs_may_be_none_where_programs_go_on(
    job: Callable[..., None], transport: Transport, may_end: bool, simulated: SimulatedWorld
) -> None:
    simulated.transport = transport
    with pytest.raises(RankFailed) as failed:
        simulated.run(job, ranks=3 if job is passes_on_and_tells else 2)
    assert (failed.value.hang, simulated.may_end) == (True, may_end)
