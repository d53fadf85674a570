"""What a rank of somebody else's code waits for, in words."""

import traceback
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeproof.worlds import posted_messages as posted
from pipeproof.worlds.stack import own_stack
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World

AT_A_WAIT = [traceback.FrameSummary("loop.py", 3, "step", line="work.wait()")]
ELSEWHERE = [traceback.FrameSummary("loop.py", 4, "step", line="x = y @ z")]


def messages(context: RankContext) -> list[Any]:
    """What rank 0 says while two of its messages are open, when one is, and when none is."""
    tensors, said = [torch.zeros(1) for _ in range(3)], []
    with posted.noted_messages():
        if context.rank == 0:
            works = [dist.irecv(tensors[0], 1), dist.irecv(tensors[1], 2)]
            said = [posted.awaited(AT_A_WAIT), posted.awaited(ELSEWHERE)]
            works[0].wait()
            said += [posted.awaited(AT_A_WAIT), posted.progress()]
            works[1].wait()
            said.append(posted.awaited(AT_A_WAIT))
        else:
            dist.batch_isend_irecv([dist.P2POp(dist.isend, tensors[0], 0)])[0].wait()
    return said


def test_open_messages_are_what_is_waited_for(world: World) -> None:
    both, elsewhere, one, progress, none = world.run(messages, ranks=3)[0]
    assert both == ("a message from rank 1 or a message from rank 2", (1, 2))
    assert elsewhere is None
    assert one == ("a message from rank 2", (2,))
    assert progress == "sent 0 and received 1"
    assert none is None


def afterwards(context: RankContext) -> float:
    """A message once nobody notes any more."""
    tensor = torch.full((1,), float(context.rank))
    with posted.noted_messages():
        pass
    _ = dist.send(tensor, 1) if context.rank == 0 else dist.recv(tensor, 0)
    return tensor.item()


def test_a_group_is_left_as_it_was(world: World) -> None:
    assert world.run(afterwards, ranks=2) == [0.0, 0.0]


class Posted:
    """A message that was met at once."""

    def is_completed(self) -> bool:
        return True


def test_each_slice_of_one_buffer_was_received_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posted, "_posted", Counter())
    monkeypatch.setattr(posted, "_received", {})
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)
    receive, buffer = posted._noting("recv", lambda *_: Posted()), torch.zeros(3, 4)
    receive(None, [buffer[0]], 1)
    receive(None, [buffer[1]], 1)
    first, second, none, both = (posted.received_at(one) for one in (buffer[0, 1:], buffer[1], buffer[2], buffer))
    assert [stack[0].text for stack in (first, second)] == [f"receive(None, [buffer[{k}]], 1)" for k in (0, 1)]
    assert none == ()
    assert both == second
    receive(None, [buffer[:2]], 1)
    assert posted.received_at(buffer[0]) == posted.received_at(buffer[1]) != first
    assert posted.received_at(torch.zeros(0)) == ()


def stack_of_rank(_: RankContext) -> list[str]:
    return [line.function for line in own_stack()]


def test_a_ranks_stack_begins_in_code_that_somebody_wrote(world: World) -> None:
    assert world.run(stack_of_rank, ranks=2) == [["stack_of_rank"]] * 2
