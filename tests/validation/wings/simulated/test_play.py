"""A world of simulated ranks is a world: results, failures and hangs as of real ranks, by its seed."""

import os
import random
import re
import threading
import time
from contextlib import nullcontext, suppress
from inspect import getsource
from queue import Queue
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeproof.pipeline.transports import Transport
from pipeproof.wings.simulated import SimulatedWorld, world
from pipeproof.worlds.accelerator import too_old
from pipeproof.worlds.rank_report import Ending, RankFailed, RankReport
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World, open_world
from tests.support.golden import golden
from tests.support.works import finish


def own_numbers(context: RankContext) -> list[float]:
    torch.manual_seed(context.rank)
    drawn = []
    for _ in range(4):
        drawn += [torch.rand(1).item(), random.random()]
        dist.barrier()
    return drawn


def test_random_numbers_are_a_ranks_own(simulated: SimulatedWorld) -> None:
    first = simulated.run(own_numbers, ranks=3)
    for rank, drawn in enumerate(first):
        torch.manual_seed(rank)
        assert drawn[::2] == [torch.rand(1).item() for _ in range(4)]
    simulated.seed = 1
    assert simulated.run(own_numbers, ranks=3) == first, "who is next changes nothing"


def order_of_events(context: RankContext) -> list[int]:
    observed = []
    if context.rank == 0:
        for _ in range(2 * (context.ranks - 1)):
            buffer = torch.empty(1)
            dist.recv(buffer)
            observed.append(int(buffer))
    else:
        for k in range(2):
            dist.send(torch.tensor([10.0 * context.rank + k]), 0)
    return observed


def test_a_seed_is_an_order_and_orders_differ(simulated: SimulatedWorld) -> None:
    orders = []
    for simulated.seed in range(8):
        orders.append(simulated.run(order_of_events, ranks=3)[0])
        assert simulated.run(order_of_events, ranks=3)[0] == orders[-1]
    assert len(set(map(tuple, orders))) > 2
    assert all(order.index(10) < order.index(11) for order in orders), "one that is sent first comes first"


def both_receive(context: RankContext) -> None:
    dist.recv(torch.empty(1), 1 - context.rank)


def test_who_waits_for_each_other_is_told_at_once(simulated: SimulatedWorld) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailed) as failed:
        simulated.run(both_receive, ranks=2)
    assert time.monotonic() - began < 10, "nobody waits for a bound"
    assert failed.value.hang
    told = str(failed.value)
    assert [report.peers for report in failed.value.reports] == [(1,), (0,)]
    assert getsource(both_receive).splitlines()[-1].strip() in told


def returns_early(context: RankContext) -> None:
    if context.rank:
        dist.barrier()


def raises(context: RankContext) -> None:
    if context.rank == 1:
        raise ValueError("bad split")
    dist.barrier()


def test_a_rank_that_raises_is_the_culprit(simulated: SimulatedWorld) -> None:
    with pytest.raises(RankFailed) as failed:
        simulated.run(raises, ranks=3)
    assert failed.value.culprit == 1
    assert isinstance(failed.value.cause, ValueError)
    assert [report.ending for report in failed.value.reports] == [Ending.STOPPED, Ending.RAISED, Ending.STOPPED]


def locks(context: RankContext) -> None:
    if context.rank == 1:
        threading.Event().wait()
    dist.barrier()


def dies(context: RankContext) -> None:
    if context.rank == 1:
        os._exit(7)
    dist.barrier()


def asks(context: RankContext) -> None:
    if context.rank == 1:
        work: Any = dist.irecv(torch.zeros(1), 0)
        while not work.is_completed():
            pass
    dist.barrier()


def goes_on(context: RankContext) -> None:
    while True:
        dist.barrier()


def never_gives_up(context: RankContext) -> None:
    while True:
        with suppress(BaseException):
            both_receive(context)


def profiles(context: RankContext) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        dist.barrier()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("job", "bound_s", "said"),
    [
        (never_gives_up, 0.5, r"^ranks 0 and 1 wait for each other: "),
        (profiles, 1.0, r"has no torch\.profiler of two ranks at once"),
        (locks, 1.0, r"rank 1 .*did not come back to the network within 1 s"),
        (asks, 1.0, r"rank 1 .*has had turn after turn, and nothing has moved for 1 s"),
        (goes_on, 0.4, r"still goes on after 2 s, and so does the run"),
        (dies, 1.0, r"exited with status 7"),
        (returns_early, 30.0, r"rank 0 has returned while others wait for it: rank 1 waits for "),
    ],
)
def test_who_blocks_or_dies_is_told_and_the_next_run_is_sound(
    job: Any, bound_s: float, said: str, simulated: SimulatedWorld
) -> None:
    with pytest.raises(RankFailed, match=said):
        simulated.run(job, ranks=2, timeout_s=bound_s)
    assert simulated.run(own_numbers, ranks=2) == simulated.run(own_numbers, ranks=2)


def test_where_nobody_knows_which_rank_holds_the_process_none_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    place, stuck = SimulatedWorld()._start_ranks(), RankReport(0, Ending.STUCK, "did not finish within 11 s", "its own")
    monkeypatch.setattr(place, "_process", SimpleNamespace(run=lambda *_, **__: [stuck]))
    reports = place.run(b"", label="", ranks=2, timeout_s=0.2, meanwhile=())
    (message,) = {report.message.partition(",")[2] for report in reports}
    golden(message)
    assert not any(report.traceback for report in reports)


def profiles_alone(context: RankContext) -> bool:
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profile if context.rank == 1 else nullcontext():
        dist.all_reduce(torch.ones(1))
    return context.rank != 1 or len(profile.events()) > 0


def is_slow(context: RankContext) -> bool:
    for _ in range(8):
        threading.Event().wait(0.1)
        dist.barrier()
    return True


def computes_in_a_thread(context: RankContext) -> bool:
    """What uses no torch.distributed may have threads."""
    found: Queue[float] = Queue()
    total = torch.ones(1)
    work = dist.all_reduce(total, async_op=True)
    thread = Thread(target=lambda: found.put(float(torch.ones(3).sum())))
    thread.start()
    thread.join()
    finish(work)
    return found.get() + float(total) == 3.0 + context.ranks


@pytest.mark.parametrize("transport", [Transport.UNLIMITED, Transport.PAIR])
@pytest.mark.parametrize(
    ("job", "ranks", "bound_s"), [(profiles_alone, 2, 30), (is_slow, 1, 0.6), (computes_in_a_thread, 2, 30)]
)
def test_what_one_rank_does_alone_ends(
    job: Any, ranks: int, bound_s: float, transport: Transport, simulated: SimulatedWorld
) -> None:
    simulated.transport = transport
    assert simulated.run(job, ranks=ranks, timeout_s=bound_s) == [True] * ranks


def test_bad_options_are_told() -> None:
    with pytest.raises(ValueError, match="kind is 'imagined': expected real or simulated"):
        open_world("imagined")
    with pytest.raises(ValueError, match="simulated ranks are on cpu"):
        SimulatedWorld(device="pretend")
    with pytest.raises(ValueError, match="transport 'carrier pigeon' is unknown: expected one of rendezvous, strict"):
        SimulatedWorld(transport="carrier pigeon")


@pytest.mark.parametrize("version", ["2.11.0", "2.12.1+cpu", "1.13.1"])
def test_a_torch_that_is_too_old_is_a_sentence(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "too_old", lambda: too_old(version))
    with pytest.raises(ValueError, match=rf"torch is {re.escape(version)}: simulated ranks want 2.13 or newer"):
        SimulatedWorld()
    World()  # real ranks are as they were
    for newer in ("2.13.0", "2.13.0+cpu", "2.14.1+cu130", "3.0.0"):
        assert too_old(newer) == ""


def waits_in_turn(context: RankContext) -> list[float]:
    """Messages and collectives as they come, with functions of torch between them."""
    buffer, found = torch.zeros(4), []
    for k in range(3):
        buffer.fill_(k) if context.rank == 0 else None
        work: Any = dist.isend(buffer, 1) if context.rank == 0 else dist.irecv(buffer, 0)
        work.wait()
        total = torch.ones(2)
        dist.all_reduce(total)
        found.append(float(total.sum() + buffer.sum()))
    return found


def spins(context: RankContext) -> None:
    while context.rank == 0:
        pass
    dist.barrier()


def test_where_else_a_run_hangs_is_known_of_those_alone_that_wait_for_ever(simulated: SimulatedWorld) -> None:
    with pytest.raises(RankFailed):
        simulated.run(both_receive, ranks=2)
    assert simulated.hangs_on() == dict.fromkeys(Transport, True)
    with pytest.raises(RankFailed, match="did not come back to the network within 1 s"):
        simulated.run(spins, ranks=2, timeout_s=1)
    assert simulated.hangs_on() == {}, "it may only be slow"


def in_a_thread(context: RankContext, waits: str) -> None:
    """Rank 0 sends in a thread of its own, and waits for that so long."""
    sent: Queue[bool] = Queue()

    def send() -> None:
        dist.send(torch.ones(1), 1)
        sent.put(True)

    if context.rank == 0:
        thread = Thread(target=send, daemon=True)
        thread.start()
        thread.join()
        if waits == "for ever":
            sent.get()
    elif waits != "not":
        dist.recv(torch.zeros(1), 0)


def caught(context: RankContext, then: str) -> None:
    """Rank 0 asks for what the simulated world has not, and goes on when it is refused."""
    if context.rank == 0:
        with suppress(NotImplementedError):
            dist.monitored_barrier()
    if then == "waits" or (then == "one waits" and context.rank):
        dist.recv(torch.zeros(1), 1 - context.rank)
    if then == "raises" and context.rank == 0:
        raise RuntimeError("of that")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("job", "how"),
    [
        *((in_a_thread, waits) for waits in ("not", "until it ended", "for ever")),
        *((caught, then) for then in ("ends", "waits", "one waits", "raises")),
    ],
)
def test_what_was_refused_once_becomes_of_the_run(job: Any, how: str, simulated: SimulatedWorld) -> None:
    lacks = "ProcessGroup.monitored_barrier" if job is caught else "torch.distributed in threads that a rank starts"
    with pytest.raises(RankFailed, match=f"the simulated world has no {lacks}") as failure:
        simulated.run(job, how, ranks=2, timeout_s=2)
    assert (failure.value.culprit, failure.value.hang) == (0, False)
    assert simulated.run(waits_in_turn, ranks=2) == [[4.0, 8.0, 12.0]] * 2, "the next run is sound"
