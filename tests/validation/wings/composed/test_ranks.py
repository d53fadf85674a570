"""Lines of ranks are replicas of each other, or parts of one; peers, with the same stages, share what each has."""

from collections.abc import Sequence

import pytest
import torch

from pipeproof.records.rank_part import Arrival, Run
from pipeproof.wings.composed.ranks import Peers, RankLines
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World

RUN = Run((0, 0, 1, 1, 2, 2, 3, 3), ("a", "b", "c", "d"), (None,) * 8)


def lines(given: Sequence[tuple[str, ...] | None], *, together: int, rank: int = 5, run: Run = RUN) -> RankLines:
    arrivals = [Arrival({}, one, "") for one in given for _ in range(2)]
    return RankLines.of(run, rank, arrivals, together=together)


TWO_OF_TWO = [("a", "b"), ("a", "b"), ("c", "d"), ("c", "d")]


def test_alike_lines_are_parts_of_cut_stages() -> None:
    found = lines(TWO_OF_TWO, together=2)
    assert (found.data, found.count, found.replicas, found.together) == ((0, 0, 2, 2), 4, 2, 2)
    assert found.replica_of_rank == [0, 0, 0, 0, 2, 2, 2, 2]
    assert (found.own, found.of_line(range(8))) == (2, [4, 5])
    assert lines(TWO_OF_TWO, together=1).replicas == 4


@pytest.mark.parametrize("given", [[("a",), ("a",), ("a",), ("b",)], [("a",), ("b",), ("c",), ("d",)]])
def test_other_lines_are_replicas(given: list[tuple[str, ...]]) -> None:
    assert lines(given, together=2).replicas == 4


def test_when_it_is_known_who_runs_what() -> None:
    apart = Run(RUN.replicas, RUN.microbatches, ((0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)))
    assert lines([("a", "b")] * 4, together=4).split
    assert not lines([("a", "b")] * 4, together=2).split
    assert not lines([("a", "b")] * 4, together=1).split
    assert lines([("a",), ("b",), ("c",), ("d",)], together=1, run=apart).split


def test_replicas_divide_losses_and_not_their_parts() -> None:
    together = Run(RUN.replicas, ("a", "b", "a", "b", "c", "d", "c", "d"), ((0, 1),) * 8)
    found = lines(TWO_OF_TWO, together=2, run=together)
    assert (found.own_divisor(None, 2), found.own_divisor(12.0, 2)) == (2.0, 6.0)
    assert RankLines().own_divisor(None, 3) == 3.0


STAGES = [[0], [1], [0], [1], [0]]


def parts(context: RankContext, dtype: torch.dtype) -> tuple[tuple[int, ...], list[list[float]]]:
    peers = Peers(context.rank, STAGES, bound_s=20)
    own = torch.full((context.rank, 2), float(context.rank)).to(dtype)
    assert [one.tolist() for one in Peers(0, [[0], [1]], 20).all_parts(torch.ones(2), [2])] == [[1.0, 1.0]], "alone"
    counts = [2 * rank for rank in peers.ranks]
    return peers.ranks, [one.float().tolist() for one in peers.all_parts(own, counts)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_unequal_parts_come_from_peers(dtype: torch.dtype, world: World) -> None:
    found = world.run(parts, dtype, ranks=len(STAGES))
    for rank, (ranks, given) in enumerate(found):
        assert ranks == ((0, 2, 4) if rank % 2 == 0 else (1, 3))
        assert given == [[float(one)] * 2 * one for one in ranks]
