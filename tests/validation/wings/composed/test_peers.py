"""Ranks with the same stages give each other what each has."""

import pytest
import torch

from pipeproof.wings.composed.peers import Peers
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World

STAGES = [[0], [1], [0], [1], [0]]


def parts(context: RankContext, dtype: torch.dtype) -> tuple[tuple[int, ...], list[list[float]]]:
    peers = Peers(context.rank, STAGES, bound_s=20)
    own = torch.full((context.rank, 2), float(context.rank)).to(dtype)
    counts = [2 * rank for rank in peers.ranks]
    return peers.ranks, [one.float().tolist() for one in peers.all_parts(own, counts)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_parts_of_unequal_length_come_from_those_with_the_same_stages(dtype: torch.dtype, world: World) -> None:
    found = world.run(parts, dtype, ranks=len(STAGES))
    for rank, (ranks, given) in enumerate(found):
        assert ranks == ((0, 2, 4) if rank % 2 == 0 else (1, 3))
        assert given == [[float(one)] * 2 * one for one in ranks]


def alone(context: RankContext) -> list[list[float]]:
    return [one.tolist() for one in Peers(context.rank, [[0], [1]], 20).all_parts(torch.ones(2), [2])]


def test_a_rank_that_has_no_peers_asks_nobody(world: World) -> None:
    assert world.run(alone, ranks=2) == [[[1.0, 1.0]]] * 2
