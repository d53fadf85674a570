"""Groups of one rank share a device: none costs a thread that never sleeps, and messages stay apart."""

import os
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipeproof.pipeline.lanes import second_lane
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World

GROUPS = 8


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_group_has_no_device_of_its_own(world: World) -> None:
    def counted(context: RankContext) -> list[int]:
        dist.new_group([0, 1])  # the first one may start what all need
        counts = [threads()]
        for _ in range(GROUPS):
            dist.new_group([0, 1])
        counts.append(threads())
        options = dist.ProcessGroupGloo._Options()
        options._devices, options._timeout = [dist.ProcessGroupGloo.create_default_device()], timedelta(seconds=30)
        options._threads = 2
        alone = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, options)
        assert alone.size() == 1
        return [*counts, threads()]

    for first, then, given in world.run(counted, ranks=2):
        assert then - first == 2 * GROUPS
        assert given - then == 3, "who brings a device has that one"


def device_threads() -> int:
    names = [Path(f"/proc/self/task/{thread}/comm").read_text() for thread in os.listdir("/proc/self/task")]
    return sum("gloo_tcp_loop" in name for name in names)


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_a_second_lane_and_a_group_with_a_bound_in_place_have_none_either(world: World) -> None:
    def counted(context: RankContext) -> list[int]:
        counts = [device_threads()]
        group = dist.new_group([0, 1])
        assert isinstance(group, dist.ProcessGroup)
        assert second_lane(group) is not None
        counts.append(device_threads())
        alone = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=30))
        assert alone.size() == 1
        return [*counts, device_threads()]

    for first, with_lane, with_bound in world.run(counted, ranks=2):
        assert (with_lane, with_bound) == (first, first)
        assert first > 0


def test_messages_of_several_groups_stay_apart(world: World) -> None:
    def exchanged(context: RankContext) -> list[float]:
        groups = [dist.new_group([0, 1], timeout=timedelta(seconds=30)) for _ in range(GROUPS)]
        numbers = [torch.full((3,), float(context.rank + 1)) * (k + 1) for k in range(GROUPS)]
        order = groups if context.rank == 0 else groups[::-1]
        works = {g: dist.all_reduce(numbers[groups.index(g)], group=g, async_op=True) for g in order}
        for work in works.values():
            assert work is not None
            work.wait()
        other = 1 - context.rank
        sent = [dist.isend(torch.tensor([float(k)]), other, group=groups[k]) for k in range(GROUPS)]
        received = []
        for k in reversed(range(GROUPS)):
            number = torch.empty(1)
            dist.recv(number, other, group=groups[k])
            received.append(number.item())
        for one in sent:
            assert one is not None
            one.wait()
        return [*(one[0].item() for one in numbers), *received]

    due = [*(3.0 * (k + 1) for k in range(GROUPS)), *(float(k) for k in reversed(range(GROUPS)))]
    assert world.run(exchanged, ranks=2) == [due, due]
