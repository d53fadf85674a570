"""The second lane of a process group: one per group, for messages to lower ranks."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from pipeproof.pipeline.lanes import second_lane
from pipeproof.pipeline.transport import DistributedTransport, Message
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.sweeps import some


def same_lane_twice(context: RankContext) -> bool:
    lane = second_lane(context.group)
    first, again = (DistributedTransport(context.group) for _ in range(2))
    return lane is not None and second_lane(context.group) is lane and first._down is again._down is lane


@pytest.mark.sweep
def test_a_group_has_one_second_lane(world: World) -> None:
    assert world.run(same_lane_twice, ranks=2) == [True, True]


def test_a_rank_alone_has_none(here: World) -> None:
    assert here.run(lambda context: second_lane(context.group), ranks=1) == [None]


def both_ways_at_once(context: RankContext) -> list[int]:
    """Every rank sends to every other under one tag: lanes must not mix them up."""
    transport = DistributedTransport(context.group, timeout_s=10.0)
    others = [rank for rank in range(context.ranks) if rank != context.rank]
    for peer in others:
        transport.post(Message("number", peer, 5), 1)
    for peer in others:
        transport.send(Message("number", peer, 5), torch.tensor([10 * context.rank + peer], dtype=torch.uint8))
    received = [int(transport.receive(Message("number", peer, 5)).item()) for peer in others]
    transport.flush()
    return received


def test_messages_both_ways_between_all_ranks(world: World) -> None:
    assert world.run(both_ways_at_once, ranks=3) == [[10, 20], [1, 21], [2, 12]]


END = """
import sys
import torch.distributed as dist
from torch import nn, randn
from pipeproof.pipeline import PipelineSchedule

rank, store, destroy = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "destroyed"
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
schedule = PipelineSchedule(kind="1f1b", n_microbatches=2, stages=[nn.Linear(2, 2)], loss_fn=nn.functional.mse_loss)
schedule.train_step([(randn(1, 2), randn(1, 2))] * 2)
if destroy:
    dist.destroy_process_group()
"""


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks
@pytest.mark.parametrize("how", some(["destroyed", "left"], left=["destroyed"]))
def test_ranks_end_cleanly_whether_or_not_the_group_was_destroyed(tmp_path: Path, how: str) -> None:
    script = tmp_path / "end.py"
    script.write_text(END)
    command = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), how], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    ends = [(rank.communicate(timeout=120)[1], rank.returncode) for rank in ranks]
    assert [code for _, code in ends] == [0, 0], ends


@pytest.mark.sweep
def test_a_lane_goes_with_its_group(world: World) -> None:
    assert world.run(lanes_left, ranks=2) == [0, 0]


def lanes_left(context: RankContext) -> int:
    from pipeproof.pipeline import lanes

    before = len(lanes._second)
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    second_lane(group)
    dist.destroy_process_group(group)
    del group
    return len(lanes._second) - before
