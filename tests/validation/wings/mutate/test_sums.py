"""What counts as a sum over ranks, and when it is changed."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from pipeproof.whitebox import WhiteBox
from pipeproof.wings.mutate import mutate, under_test
from pipeproof.wings.mutate.sums import is_sum
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World

WIDTH = 4


@pytest.mark.parametrize(
    ("given", "sums"),
    [
        ((), True),
        ((dist.ReduceOp.AVG,), True),
        ((dist.ReduceOp.MAX,), False),
        ((dist.ReduceOp(dist.ReduceOp.MIN),), False),
    ],
)
def test_sums_and_averages_are_sums(given: tuple[object, ...], sums: bool) -> None:
    assert is_sum([torch.ones(2)], *given) == sums
    assert not is_sum(torch.ones(2, dtype=torch.int64), *given), "not of integers"


def overlapping(context: RankContext, *, future: bool, strict: bool) -> None:
    """Rank 0 begins a sum, and sends what rank 1 needs to get there before it waits."""
    given, got = torch.ones(WIDTH) * (1 + context.rank), torch.zeros(2)
    with under_test():
        if context.rank == 0:
            work = dist.all_reduce(given, async_op=True)
            dist.send(torch.ones(2), 1)
            work.get_future().wait() if future else work.wait()
            assert future or work.is_completed()
        else:
            dist.recv(got, 0)
            dist.all_reduce(given)
    assert not strict or torch.equal(given, torch.full((WIDTH,), 3.0))


@pytest.mark.parametrize("future", [False, True])
@pytest.mark.parametrize(("strict", "outcome"), [(False, "let pass"), (True, "caught")])
def test_a_sum_is_changed_when_the_step_waits_for_it(world: World, *, future: bool, strict: bool, outcome: str) -> None:
    test, only = partial(overlapping, future=future, strict=strict), ["reduction-left-out", "reduction-doubled"]
    found = mutate(test, ranks=2, only=only, timeout_s=10, whitebox=WhiteBox(world))
    assert [one.outcome for one in found.tried] == [outcome] * 2, str(found)
    assert not strict or all("raised AssertionError" in one.how for one in found.tried), str(found)
