"""The side store where no torchrun started the ranks: over the store of their default group."""

import pytest
import torch

from pipeproof import World
from pipeproof.worlds.side_store import exchange
from pipeproof.worlds.worker import RankContext


def met(context: RankContext) -> list[object]:
    """Two exchanges one after the other, each with a tensor of rank 1's."""
    found: list[object] = []
    for number in range(2):
        one = exchange()
        if one.rank == 1:
            one.give("tensor", torch.full((2,), float(number)))
        found.append(
            (one.gather(context.rank, what="the meeting", bound_s=10), one.take("tensor", bound_s=10).tolist())
        )
        one.finish(None, what="the end", bound_s=10)
    return found


@pytest.mark.pipeproof_ranks
def test_ranks_of_a_group_of_their_own_can_agree(world: World) -> None:
    for _ in range(2):  # on ranks that are used again
        assert world.run(met, ranks=2) == [[([0, 1], [0.0, 0.0]), ([0, 1], [1.0, 1.0])]] * 2


def test_one_rank_has_nobody_to_speak_with() -> None:
    assert (exchange().rank, exchange().ranks) == (0, 1)
