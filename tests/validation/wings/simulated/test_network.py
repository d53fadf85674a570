"""Messages move as a transport allows: what a static model calls a deadlock is one here, and nothing else is."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pipeproof.pipeline.action import RECEIVES, SENDS, Action, Kind
from pipeproof.pipeline.deadlock import deadlocks
from pipeproof.pipeline.program import Program
from pipeproof.pipeline.program_laws import message_order
from pipeproof.pipeline.transports import RULES, Transport
from pipeproof.wings.simulated import SimulatedWorld
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.programs import programs
from tests.support.works import finish

_NEEDS = {Kind.FORWARD: Kind.RECV_F, Kind.BACKWARD: Kind.RECV_B, Kind.BACKWARD_INPUT: Kind.RECV_B}
_SENT = {Kind.WAIT_SEND_F: Kind.SEND_F, Kind.WAIT_SEND_B: Kind.SEND_B}


def follow(context: RankContext, program: Program) -> None:
    """Do what a program says with empty hands: its messages alone, waited for where they are needed."""
    placement, works = program.schedule.placement, {}
    for stage, kind, m in program.ranks[context.rank]:
        if kind in SENDS or kind in RECEIVES:
            forward = kind in (Kind.SEND_F, Kind.RECV_F)
            other = stage + (1 if forward is (kind in SENDS) else -1)
            maker = stage if kind in SENDS else other
            tag = 2 * (maker * 1000 + m) + forward
            post: Any = dist.isend if kind in SENDS else dist.irecv
            works[Action(stage, kind, m)] = post(torch.full((1,), float(tag)), placement[other], tag=tag)
        elif kind in _SENT:
            works[Action(stage, _SENT[kind], m)].wait()
        elif (needed := Action(stage, _NEEDS.get(kind, kind), m)) in works:
            works[needed].wait()
    for work in works.values():
        work.wait()


def stuck(world: World, *job: Any, ranks: int) -> bool:
    try:
        world.run(*job, ranks=ranks)
    except RankFailed as failure:
        if failure.hang:
            return True
        raise
    return False


@pytest.mark.long
@given(program=programs(), room=st.integers(0, 3))
@settings(deadline=None, max_examples=12)
def test_static_models_and_simulated_runs_agree(kept_simulated: SimulatedWorld, program: Program, room: int) -> None:
    """Also where messages are kept."""
    assume(not any(message_order(program)))  # what uses a message before it is posted waits for nothing that runs
    for transport, found in deadlocks(program, room=room).items():
        kept_simulated.transport = transport
        kept_simulated.room = 0 if RULES[transport].by_name else room * torch.ones(1).nbytes
        for kept_simulated.seed in range(2):
            assert stuck(kept_simulated, follow, program, ranks=len(program.ranks)) is (found is not None), transport


def sends_first(context: RankContext) -> None:
    sent = dist.isend(torch.ones(1), 1 - context.rank)
    dist.recv(torch.empty(1), 1 - context.rank)
    finish(sent)


def batched(context: RankContext) -> None:
    peer = 1 - context.rank
    sent, came = dist.P2POp(dist.isend, torch.ones(1), peer), dist.P2POp(dist.irecv, torch.empty(1), peer)
    for work in dist.batch_isend_irecv([sent, came]):
        work.wait()


def waits_for_its_send(context: RankContext, size: int = 1, times: int = 1) -> None:
    for call in (dist.send, dist.recv):
        for _ in range(times):
            call(torch.ones(size), 1 - context.rank)


def never_sends(context: RankContext) -> None:
    dist.recv(torch.empty(1), 1 - context.rank)


def larger_first(context: RankContext) -> bool:
    """Whether the second of two messages that are posted together is ever known to have left before the first."""
    if context.rank:
        for size in (64, 1):
            dist.recv(torch.empty(size), 0)
        return False
    first, second = dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.ones(size), 1) for size in (64, 1)])
    return any(second.is_completed() and not first.is_completed() for _ in range(8))


def kept_and_then_written(context: RankContext) -> list[float]:
    """What fits is kept as it was sent; the last of three waits until there is room again."""
    if context.rank:
        buffers = torch.zeros(3, 1)
        for row in buffers:
            dist.recv(row, 0)
        return buffers.flatten().tolist()
    sent = torch.zeros(1)
    for _ in range(3):
        dist.send(sent.add_(1), 1)
    return []


def test_how_much_room_a_habit_needs(simulated: SimulatedWorld) -> None:
    for simulated.transport, job, needed in (
        (Transport.PAIR, sends_first, 4),
        (Transport.PAIR, partial(waits_for_its_send, size=5), 20),
        (Transport.PAIR, partial(waits_for_its_send, times=3), 12),
        (Transport.PAIR, never_sends, None),
        (Transport.UNLIMITED, waits_for_its_send, None),
    ):
        assert stuck(simulated, job, ranks=2)
        assert simulated.least_room() == needed


@pytest.mark.parametrize("room", [-1, True, "4096", 4096.0, None])
def test_room_is_a_number_of_bytes(room: Any, simulated: SimulatedWorld) -> None:
    with pytest.raises(ValueError, match=f"room is {room!r}: expected a number of bytes, as 4096, or 0 for none"):
        simulated.room = room


def test_room_wants_messages_in_order(simulated: SimulatedWorld) -> None:
    simulated.room = 4
    with pytest.raises(ValueError, match=r"room is 4: transport gloo has no room .*: expected one of .*, or room 0"):
        simulated.run(never_sends, ranks=2)


def test_nothing_is_kept_without_room_not_even_nothing(simulated: SimulatedWorld) -> None:
    for simulated.transport in Transport:
        assert stuck(simulated, waits_for_its_send, 0, ranks=2) is (simulated.transport is not Transport.BUFFERED)


EVERY = set(Transport)


@pytest.mark.parametrize(
    ("job", "free"),
    [
        (sends_first, EVERY - {Transport.STRICT, Transport.RANK, Transport.PAIR}),
        (batched, EVERY),
        (waits_for_its_send, {Transport.BUFFERED}),
    ],
)
def test_which_transports_a_habit_hangs_on(job: Any, free: set[Transport], simulated: SimulatedWorld) -> None:
    found = set()
    for simulated.transport in Transport:
        if not stuck(simulated, job, ranks=2):
            found.add(simulated.transport)
    assert found == free


def crossed(context: RankContext) -> list[float]:
    if context.rank == 0:
        works = [dist.isend(torch.full((1,), float(tag)), 1, tag=tag) for tag in (1, 2)]
    else:
        buffers = [torch.empty(1) for _ in range(2)]
        works = [dist.irecv(buffer, 0, tag=tag) for buffer, tag in zip(buffers, (2, 1), strict=True)]
    finish(*works)
    return [] if context.rank == 0 else [float(buffer) for buffer in buffers]


def to_a_subgroup(context: RankContext) -> float:
    group = dist.new_group([1, 2])
    buffer = torch.zeros(1)
    if context.rank == 1:
        dist.send(torch.ones(1), 2, group=group)
    elif context.rank == 2:
        dist.recv(buffer, 1, group=group)
    return float(buffer)


BY_TAG = {Transport.UNLIMITED, Transport.BUFFERED}


@pytest.mark.parametrize(
    ("job", "transports", "room", "expected"),
    [
        (kept_and_then_written, EVERY - BY_TAG, 8, [[], [1.0, 2.0, 3.0]]),  # what is kept is what was sent
        (larger_first, {Transport.DIRECTED}, 8, [False, False]),  # a smaller message is not kept before a larger one
        (crossed, BY_TAG, 0, [[], [2.0, 1.0]]),
        (crossed, EVERY - BY_TAG - {Transport.STRICT}, 0, [[], [1.0, 2.0]]),  # what keeps order heeds no tags
        (to_a_subgroup, {Transport.UNLIMITED}, 0, [0.0, 0.0, 1.0]),
    ],
)
def test_what_comes_by_the_rules_of_transports(
    job: Any, transports: set[Transport], room: int, expected: list[Any], simulated: SimulatedWorld
) -> None:
    simulated.room = room
    for simulated.transport in transports:
        for simulated.seed in range(8):
            assert simulated.run(job, ranks=len(expected)) == expected
