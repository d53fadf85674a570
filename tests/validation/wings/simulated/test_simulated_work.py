"""What is done to buffers on their way is told by name: written, freed, resized, read, by messages and collectives."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.pipeline.transports import Transport
from pipeproof.wings.simulated import SimulatedWorld
from pipeproof.worlds.worker import RankContext
from tests.support.sweeps import each_once
from tests.support.works import finish, race_of

Deed = Callable[[Tensor], object]


def written(buffer: Tensor) -> None:
    buffer.zero_()


def written_through_its_base(buffer: Tensor) -> None:
    assert buffer._base is not None, "it is a view"
    buffer._base.zero_()


def written_and_put_back(buffer: Tensor) -> None:
    """The message may leave in between."""
    buffer.add_(1)
    buffer.sub_(1)


def let_go(buffer: Tensor) -> None:
    buffer.data = torch.empty(1)


def resized(buffer: Tensor) -> None:
    buffer.untyped_storage().resize_(0)


def enlarged(buffer: Tensor) -> None:
    buffer.resize_(1 << 16)


DEEDS: dict[Deed, str] = {
    written_and_put_back: "overwritten-in-flight",
    written: "overwritten-in-flight",
    written_through_its_base: "overwritten-in-flight",
    let_go: "freed-in-flight",
    resized: "freed-in-flight",
    enlarged: "freed-in-flight",
}


def buffer_for(deed: Deed) -> Tensor:
    return torch.ones(4, 4)[1] if deed is written_through_its_base else torch.ones(4)


def sent(context: RankContext, deed: Deed) -> list[float]:
    """Rank 0 sends, and does the deed before it waits."""
    if context.rank == 0:
        buffer = buffer_for(deed)
        work = dist.isend(buffer, 1)
        deed(buffer)
        finish(work)
        return []
    received = torch.zeros(4)
    dist.recv(received, 0)
    return received.tolist()


def received(context: RankContext, deed: Deed) -> None:
    """Rank 0 receives, and does the deed before it waits."""
    if context.rank == 1:
        dist.send(torch.ones(4), 0)
        return
    buffer = buffer_for(deed)
    work = dist.irecv(buffer, 1)
    deed(buffer)
    finish(work)


def reduced(context: RankContext, deed: Deed) -> None:
    """Rank 0 adds up with others, and does the deed before it waits."""
    buffer = buffer_for(deed)
    work = dist.all_reduce(buffer, async_op=True)
    if context.rank == 0:
        deed(buffer)
    finish(work)


@pytest.mark.parametrize(
    *each_once(deed=DEEDS, job=[sent, received, reduced], transport=[Transport.UNLIMITED, Transport.PAIR])
)
def test_what_is_done_to_a_buffer_on_its_way_is_told(
    job: Callable[..., object], deed: Deed, transport: Transport, simulated: SimulatedWorld
) -> None:
    simulated.transport = transport
    race = race_of(simulated, job, deed)
    assert (race.kind, race.rank) == (DEEDS[deed], 0), str(race)
    lines = dict(race.lines)
    did = lines.get("written") or lines.get("freed")
    if deed is resized:
        assert did is None, "what is done to a storage calls no function of torch"
    else:
        assert did is not None, "the line that did it is told"
        assert did.function == deed.__name__
    (posted,) = {"sent", "received", "called"} & {*lines}
    assert lines[posted].function == job.__name__


def written_unseen(context: RankContext) -> None:
    """Rank 0 writes what no function of torch writes, and then calls some on the buffer, which write nothing."""
    if context.rank == 1:
        dist.recv(torch.zeros(4), 0)
        return
    buffer = torch.ones(4)
    array = buffer.numpy()
    work = dist.isend(buffer, 1)
    array[0] = 2.0
    assert buffer.view(2, 2).sum() == 5.0
    finish(work)


def test_a_buffered_transport_has_its_own_copy(simulated: SimulatedWorld) -> None:
    simulated.transport = Transport.BUFFERED
    for deed in DEEDS:
        assert simulated.run(sent, deed, ranks=2)[1] == [1.0] * 4


def kept_elsewhere(context: RankContext) -> list[float]:
    """Another tensor goes in its place, but somebody else still has the memory: that is no fault."""
    if context.rank == 0:
        buffer = torch.ones(4)
        kept, work = buffer.view(2, 2), dist.isend(buffer, 1)
        buffer.data = torch.empty(1)
        finish(work)
        return kept.flatten().tolist()
    buffer = torch.zeros(4)
    kept, work = buffer.view(2, 2), dist.irecv(buffer, 0)
    buffer.data = torch.empty(1)
    finish(work)
    return kept.flatten().tolist()


def test_memory_that_somebody_else_keeps_is_there(simulated: SimulatedWorld) -> None:
    for simulated.seed in range(5):
        assert simulated.run(kept_elsewhere, ranks=2) == [[1.0] * 4] * 2


COLLECTIVES = ("all_reduce", "broadcast", "all_gather")


def used_early(context: RankContext, collective: str) -> None:
    buffer: Any = torch.ones(4)
    works = {
        "all_reduce": lambda: dist.all_reduce(buffer, async_op=True),
        "broadcast": lambda: dist.broadcast(buffer, 0, async_op=True),
        "all_gather": lambda: dist.all_gather_into_tensor(torch.empty(8), buffer, async_op=True),
    }
    work = works[collective]()
    used = work.result()[0] if context.rank == 1 else None
    if used is not None:
        used.sum()
    work.wait()


def passed_on(context: RankContext, collective: bool) -> None:
    """What has not come is sent on, or added up."""
    buffer, other = torch.ones(4), 1 - context.rank
    works = [dist.irecv(buffer, other), dist.isend(torch.ones(4), other)]
    if collective:
        dist.all_reduce(buffer)
    else:
        works.append(dist.isend(buffer, other))
    finish(*works)


def two_in_one(context: RankContext, first: str) -> None:
    """A message and a collective, or two collectives, into one buffer."""
    buffer = torch.zeros(4)
    if context.rank == 0:
        works = [dist.broadcast(torch.ones(4), 0, async_op=True) for _ in range(2 if first == "broadcast" else 1)]
        works += [dist.isend(torch.ones(4), 1)] if first == "receive" else []
    else:
        works = [dist.irecv(buffer, 0)] if first == "receive" else [dist.broadcast(buffer, 0, async_op=True)]
        works.append(dist.broadcast(buffer, 0, async_op=True))
    finish(*works)


def one_after_the_other(context: RankContext) -> list[float]:
    buffer = torch.ones(4)
    works = [dist.all_reduce(buffer, async_op=True) for _ in range(3)]
    finish(*works)
    return buffer.tolist()


def scatters_less(context: RankContext) -> None:
    parts = [torch.ones(1)] * context.ranks if context.rank == 0 else None
    dist.scatter(torch.empty(2), parts)


def gathers_less(context: RankContext) -> None:
    dist.all_gather_into_tensor(torch.empty(3), torch.ones(1))


@pytest.mark.parametrize(
    ("job", "kind", "rank", "lines"),
    [
        *((partial(used_early, collective=name), "read-before-wait", 1, ["used", "called"]) for name in COLLECTIVES),
        (partial(passed_on, collective=False), "read-before-wait", 1, ["used", "received"]),
        (partial(passed_on, collective=True), "read-before-wait", 1, ["used", "received"]),
        (partial(two_in_one, first="receive"), "received-twice", 1, ["first posted", "second posted"]),
        (partial(two_in_one, first="broadcast"), "received-twice", 1, ["first posted", "second posted"]),
        (written_unseen, "overwritten-in-flight", 0, ["sent"]),  # what only reads wrote nothing
        (one_after_the_other, "read-before-wait", 1, ["used", "called"]),
        (scatters_less, "mismatched", 1, ["received"]),
        (gathers_less, "mismatched", 1, ["received"]),
    ],
)
def test_a_race_has_its_kind_its_rank_and_its_lines(
    job: Callable[..., object], kind: str, rank: int, lines: list[str], simulated: SimulatedWorld
) -> None:
    race = race_of(simulated, job)
    assert (race.kind, race.rank, [what for what, _ in race.lines]) == (kind, rank, lines), str(race)
    assert {Path(line.file).name for _, line in race.lines} == {Path(__file__).name}


def test_nccl_has_the_collectives_of_a_group_one_after_the_other(simulated: SimulatedWorld) -> None:
    simulated.transport = Transport.PAIR
    for simulated.seed in range(10):
        assert simulated.run(one_after_the_other, ranks=2) == [[8.0] * 4] * 2
