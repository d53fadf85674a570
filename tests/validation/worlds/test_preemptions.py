"""A failing interleaving keeps the preemptions that it needs, and no other."""

from typing import Any

import torch
import torch.distributed as dist

from pipeproof.worlds.preemptions import fewest
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.simulated.guide import Guide
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World


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


def fails(world: World) -> bool:
    try:
        world.run(overwrites, ranks=2)
    except RankFailed:
        return True
    return False


def test_few_preemptions_are_left(simulated: World) -> None:
    seed = next(seed for seed in range(20) if _fails_under(simulated, seed))
    fewest(simulated, lambda: fails(simulated))
    assert isinstance(simulated.seed, Guide)
    assert len(simulated.seed.preemptions) <= 1, f"seed {seed} is shrunk to {simulated.seed}"
    assert fails(simulated)
    simulated.seed = Guide()
    assert not fails(simulated), "in turn it passes: it takes a preemption"


def _fails_under(world: World, seed: int) -> bool:
    world.seed = seed
    return fails(world)


def test_what_does_not_fail_again_keeps_its_seed(simulated: World) -> None:
    simulated.seed = 3
    fewest(simulated, lambda: False)
    assert simulated.seed == 3


def test_what_fails_in_turn_needs_no_preemption(simulated: World) -> None:
    simulated.seed = 3

    def always() -> bool:
        fails(simulated)
        return True

    fewest(simulated, always)
    assert simulated.seed == Guide()
