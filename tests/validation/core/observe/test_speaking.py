"""A computation that speaks to other ranks is told from one that does not."""

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from pipeproof.core.observe.speaking import Speaking
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World


def spoke(context: RankContext) -> list[bool]:
    group = dist.group.WORLD
    assert group is not None
    others = context.rank ^ 1
    alone = [dist.new_group([rank]) for rank in range(2)][context.rank]
    ways = [
        lambda: dist.all_reduce(torch.ones(2), group=alone),
        lambda: functional.all_reduce(torch.ones(2), "sum", alone).sum(),
        lambda: torch.ones(2) @ torch.ones(2),
        lambda: dist.all_reduce(torch.ones(2)),
        lambda: functional.all_reduce(torch.ones(2), "sum", group).sum(),
        lambda: dist.all_to_all([torch.empty(1) for _ in range(2)], [torch.ones(1) for _ in range(2)]),
        lambda: dist.send(torch.ones(1), others) if context.rank else dist.recv(torch.empty(1), others),
    ]
    found = []
    for way in ways:
        with Speaking() as speaking:
            way()
        found.append(speaking.spoke)
    return found


def test_what_is_sent_received_or_reduced_is_noted(world: World) -> None:
    assert world.run(spoke, ranks=2) == [[False, False, False, True, True, True, True]] * 2
