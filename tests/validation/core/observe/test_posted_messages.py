"""What a rank of somebody else's code waits for, in words."""

from collections import Counter
from functools import partial
from threading import Thread, get_ident
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeproof.core.observe import posted_messages as posted
from pipeproof.core.observe.stack import own_stack
from pipeproof.worlds.rank_report import RankFailed, details
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.golden import golden


def messages(context: RankContext) -> list[Any]:
    """What another thread of rank 0 is told while that waits for a message, one of several that are open, and after."""
    tensors, said, own = [torch.zeros(1) for _ in range(3)], list[Any](), get_ident()

    def look() -> None:
        while posted.find_awaited(own) is None:
            sleep(0.01)
        said.extend([posted.find_awaited(own), posted.progress()])
        dist.send(torch.ones(1), 1)

    with posted.note_messages():
        if context.rank == 0:
            works = [dist.isend(tensors[0], 1), dist.irecv(tensors[1], 2), dist.irecv(tensors[2], 1)]
            said.append(posted.find_awaited(own))
            works[1].wait()
            posted.did("backward", 3, "its stage")
            Thread(target=look, daemon=True).start()
            works[2].wait()
            return [*said, posted.find_awaited(own)]
        if context.rank == 1:
            for tensor in tensors[:2]:
                dist.recv(tensor, 0)
        dist.send(tensors[0], 0)
    return said


def test_what_a_rank_stands_at_is_what_it_waits_for(world: World) -> None:
    before, standing, progress, after = world.run(messages, ranks=3)[0]
    assert standing[1] == (1,)
    golden(f"{standing[0]}; {progress}")
    assert before is after is None


def refused(context: RankContext, places: list[str]) -> list[str]:
    """What is said of messages from these places that gloo does not take, as torch says it of a GPU's."""

    def send(group: dist.ProcessGroup, *_: object) -> None:
        raise RuntimeError("writev: Bad address")

    own, said = dist.ProcessGroup.send, []
    dist.ProcessGroup.send = send  # type: ignore[method-assign, assignment]
    try:
        with posted.note_messages():
            for place in places:
                message: Any = SimpleNamespace(device=torch.device(place), any=bool)
                with pytest.raises(RuntimeError) as raised:
                    context.group.send([message], 0, 0)
                said.append(str(raised.value))
    finally:
        dist.ProcessGroup.send = own  # type: ignore[method-assign]
    return said


@pytest.mark.sweep
def test_gloo_reads_no_devices_memory_and_the_cure_is_told(world: World) -> None:
    ((on_the_host, on_a_device),) = world.run(refused, ["cpu", "cuda:0"], ranks=1)
    assert on_the_host == "writev: Bad address"
    golden(on_a_device)


def afterwards(context: RankContext) -> float:
    """A message once nobody notes any more."""
    tensor = torch.full((1,), float(context.rank))
    with posted.note_messages():
        pass
    _ = dist.send(tensor, 1) if context.rank == 0 else dist.recv(tensor, 0)
    return tensor.item()


@pytest.mark.sweep
def test_a_group_is_left_as_it_was(world: World) -> None:
    assert world.run(afterwards, ranks=2) == [0.0, 0.0]


def one_too_few(context: RankContext) -> None:
    """Rank 1 waits for a second message, and rank 0 sends one."""
    with posted.note_messages():
        for _ in range(1 + context.rank):
            dist.recv(torch.zeros(1), 0) if context.rank else dist.send(torch.zeros(1), 1)


def test_a_rank_that_is_waited_for_has_left_behind_its_last_message(world: World) -> None:
    with pytest.raises(RankFailed, match="rank 0 has returned while others wait for it") as failure:
        world.run(one_too_few, ranks=2, timeout_s=2.0)
    said = details(failure.value.reports)
    golden(said, lines="^rank 0|returned:")
    assert "one_too_few: dist.recv(torch.zeros(1), 0)" in said
    assert world.run(stack_of_rank, ranks=2)
    assert posted.parting() == ""


def in_groups(context: RankContext, *, inside: bool) -> None:
    """Of two groups the first ranks stand in a call that the others do not come to, with a send that is out."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    own, tensors = groups[context.rank // 2], [torch.zeros(1) for _ in range(2)]
    with posted.note_messages():
        if context.rank % 2 == 0:
            work = dist.isend(tensors[0], context.rank ^ 2)
            dist.recv(tensors[1], context.rank ^ 2)
            dist.all_reduce(tensors[1], group=own) if inside else dist.recv(tensors[1], context.rank + 1)
            work.wait()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("inside", "waits"),
    [(True, "torch.distributed.all_reduce of the group of ranks {}, {}"), (False, "a message from rank {1}")],
)
def test_the_call_in_which_a_rank_stands_says_for_whom_it_waits(world: World, inside: bool, waits: str) -> None:
    with pytest.raises(RankFailed) as failure:
        world.run(partial(in_groups, inside=inside), ranks=4, timeout_s=5.0)
    reports = failure.value.reports
    assert [reports[rank].peers for rank in (0, 2)] == [(1,), (3,)]
    assert [reports[rank].waiting for rank in (0, 2)] == [waits.format(0, 1), waits.format(2, 3)]
    golden("\n".join(reports[rank].progress for rank in (0, 2)))
    assert "worlds/posted_messages.py" not in reports[0].traceback


def test_each_slice_of_one_buffer_was_received_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    for noted in ("_posted", "_ways"):
        monkeypatch.setattr(posted, noted, Counter())
    monkeypatch.setattr(posted, "_received", {})
    monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    # As much of a message, met at once, and of a process group as is looked at.
    work, group = SimpleNamespace(is_completed=lambda: True), SimpleNamespace(group_name="pipeline")
    receive, buffer = posted._noting("recv", lambda *_: work), torch.zeros(3, 4)
    receive(group, [buffer[0]], 1)
    receive(group, [buffer[1]], 1)
    first, second, *others = (posted.find_received(one) for one in (buffer[0, 1:], buffer[1], buffer, buffer[2]))
    texts = ["" if came is None else came.received[0].text for came in (first, second)]
    assert texts == [f"receive(group, [buffer[{k}]], 1)" for k in (0, 1)]
    assert others == [second, None]
    receive(group, [buffer[:2]], 1)
    assert posted.find_received(buffer[0]) == posted.find_received(buffer[1]) != first
    assert posted.find_received(torch.zeros(0)) is None


def messages_of_two(context: RankContext) -> Any:
    """What rank 0 sent, and what rank 1 received: in order of posting, and of another tag in between."""
    with posted.note_messages():
        if context.rank == 0:
            tensors = [torch.full((1,), float(value)) for value in (1, 2, 0)]
            works = [dist.isend(one, 1, tag=tag) for one, tag in zip(tensors, (0, 5, 0), strict=True)]
            return [work.wait() for work in works] and posted.list_sent()
        tensors = [torch.zeros(1) for _ in range(3)]
        for tensor, tag in zip(tensors, (0, 0, 5), strict=True):
            dist.recv(tensor, 0, tag=tag)
        return [(tensor.item(), posted.find_received(tensor)) for tensor in tensors]


def test_a_message_is_known_again_where_it_was_sent(world: World) -> None:
    sent, received = world.run(messages_of_two, ranks=2)
    joined = {value: came.join(sent) for value, came in received}
    numbers = {value: (came.message.sender, came.message.tag, came.message.number) for value, came in joined.items()}
    assert numbers == {1.0: (0, 0, 1), 0.0: (0, 0, 2), 2.0: (0, 5, 1)}
    assert [came.sent.empty for came in joined.values()] == [value == 0.0 for value in joined]
    assert all(came.sent.stack[0].text.startswith("works = [dist.isend(one,") for came in joined.values())


def from_any(context: RankContext) -> Any:
    """A message from any rank, and one after it that may be any then."""
    with posted.note_messages():
        if context.rank == 0:
            return [dist.send(torch.ones(1), 1) for _ in range(2)]
        tensors = [torch.zeros(1) for _ in range(2)]
        for tensor, source in zip(tensors, (None, 0), strict=True):
            dist.recv(tensor, source)
        return [posted.find_received(tensor) for tensor in tensors]


def test_behind_a_message_from_any_rank_nobody_counts(world: World) -> None:
    _, received = world.run(from_any, ranks=2)
    assert [came.message for came in received] == [None, None]
    assert all(came.received and not came.join({}).sent for came in received)


def stack_of_rank(_: RankContext) -> list[str]:
    return [line.function for line in own_stack()]


def test_a_ranks_stack_begins_in_code_that_somebody_wrote(world: World) -> None:
    assert world.run(stack_of_rank, ranks=2) == [["stack_of_rank"]] * 2


def test_what_was_done_while_nothing_was_noted_is_not_said_of_a_later_job() -> None:
    posted.did("backward", 3, "its stage")
    with posted.note_messages():
        assert posted.progress() == ""
        posted.did("forward", 1, "its stage")
        golden(posted.progress())
    assert posted.progress() == ""
