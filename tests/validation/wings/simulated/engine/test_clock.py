"""Virtual time: what a simulated rank sleeps, waits and computes, by its own clock; nothing of it takes real time."""

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from datetime import timedelta
from functools import partial
from multiprocessing.connection import wait
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeproof.own.case import Case
from pipeproof.own.measured import measure
from pipeproof.pipeline.schedules import FAMILIES, virtuals
from pipeproof.pipeline.timeline import Times, simulate
from pipeproof.pipeline.transports import Transport
from pipeproof.wings.simulated import SimulatedWorld
from pipeproof.wings.simulated.engine.simulation import Timing
from pipeproof.worlds.worker import RankContext

HOUR_S = timedelta(hours=1).total_seconds()


def sleeping(context: RankContext) -> list[float]:
    from time import sleep  # as code has it that never looks at the module again

    began = time.time(), time.monotonic(), time.perf_counter(), time.monotonic_ns() / 1e9
    sleep((1 + context.rank) * HOUR_S)
    ended = time.time(), time.monotonic(), time.perf_counter(), time.monotonic_ns() / 1e9
    return [(end - begin) / HOUR_S for begin, end in zip(began, ended, strict=True)]


def dated(context: RankContext) -> tuple[float, float]:
    return time.time(), time.monotonic()


def test_every_run_begins_at_the_same_time(simulated: SimulatedWorld) -> None:
    assert simulated.run(dated, ranks=2) == simulated.run(dated, ranks=2)


def awaiting(context: RankContext) -> float:
    buffer, peer = torch.zeros(1), 1 - context.rank
    if context.rank == 0:
        time.sleep(5)
        dist.send(buffer, peer)
    else:
        time.sleep(2)
        dist.recv(buffer, peer)
    return time.monotonic()


def test_who_waits_for_a_message_goes_on_when_it_is_there(simulated: SimulatedWorld) -> None:
    simulated.timing = Timing(latency_s=0.5)
    for transport, sent in ((Transport.UNLIMITED, 5.5), (Transport.PAIR, 5.5), (Transport.BUFFERED, 5.0)):
        simulated.transport = transport
        assert simulated.run(awaiting, ranks=2) == [sent, 5.5]


def summing(context: RankContext) -> float:
    time.sleep(context.rank)
    dist.all_reduce(torch.ones(1))
    return time.monotonic()


def asks_when(context: RankContext) -> list[float]:
    """Two sends at once, three one after the other, and two in a batch, whose receives are late."""
    sends, found = context.rank == 0, []
    post: Any = dist.isend if sends else dist.irecv
    time.sleep(1.0 - sends)
    works = [post(torch.ones(1), 1 - context.rank)]
    time.sleep(0.1)
    works += [post(torch.ones(1), 1 - context.rank)]
    for work in works:
        work.wait()
        found.append(time.time())
    for _ in range(3):
        time.sleep(0.5 * context.rank)
        post(torch.ones(1), 1 - context.rank).wait()
        found.append(time.time())
    for work in dist.batch_isend_irecv([dist.P2POp(post, torch.ones(size), 1 - context.rank) for size in (3, 1, 2)]):
        work.wait()
    return [*found, time.time()]


@pytest.mark.parametrize("room", [0, 4, 16])
def test_when_messages_come_does_not_depend_on_who_is_next(room: int, simulated: SimulatedWorld) -> None:
    simulated.timing, simulated.room, found = Timing(latency_s=0.25), room, {}
    for simulated.transport in (Transport.STRICT, Transport.PAIR):
        for simulated.seed in range(6):
            found.setdefault(simulated.transport, set()).add(str(simulated.run(asks_when, ranks=2)))
    assert {*map(len, found.values())} == {1}


def impatient(context: RankContext) -> bool:
    until, asked = time.monotonic() + 3, 0
    while time.monotonic() < until:
        asked += 1
    return asked > 1000


def polling(context: RankContext) -> float:
    buffer = torch.zeros(1)
    if context.rank == 0:
        time.sleep(1)
        dist.send(buffer, 1)
        return time.monotonic()
    work = dist.irecv(buffer, 0)
    while not work.is_completed():
        time.sleep(0.01)
    return time.monotonic()


def test_who_asks_now_and_then_learns_it_after_it_came(simulated: SimulatedWorld) -> None:
    for simulated.seed in range(6):
        sent, learnt = simulated.run(polling, ranks=2)
        assert sent == 1 <= learnt < 60


def waits_really(context: RankContext) -> list[object]:
    """Python's own waits for what is no rank's, with a bound."""

    async def nap() -> str:
        await asyncio.sleep(0.05)
        try:
            await asyncio.wait_for(asyncio.Event().wait(), 0.05)
        except TimeoutError:
            return "late"
        return "came"

    event = threading.Event()
    read, write = os.pipe()
    with ThreadPoolExecutor(1) as threads:
        left = threads.submit(event.wait)
        try:
            done = len(list(as_completed([left], timeout=0.01)))
        except TimeoutError:
            done = 0
        event.set()
    dist.barrier()
    observed = [asyncio.run(nap()), done, wait([read], 0.01)]
    for one in (read, write):
        os.close(one)
    return observed


@pytest.mark.parametrize(
    ("job", "ranks", "expected"),
    [
        (sleeping, 3, [pytest.approx([k] * 4) for k in (1, 2, 3)]),  # by its own clock and no other
        (summing, 3, [2.25] * 3),  # a collective is over once the last has come
        (impatient, 1, [True]),  # who only looks at the clock sees it go on
        (waits_really, 2, [["late", 0, []]] * 2),  # what waits for real things by a bound waits so long
    ],
)
def test_how_time_passes(job: Any, ranks: int, expected: object, simulated: SimulatedWorld) -> None:
    simulated.timing, began = Timing(latency_s=0.25), time.monotonic()
    assert simulated.run(job, ranks=ranks, timeout_s=3) == expected
    assert time.monotonic() - began < HOUR_S / 10, "the machine's clock has not"


def refused(context: RankContext, secs: Any) -> tuple[str, str]:
    said = []
    for sleep in (time.sleep, partial(asks_the_real_one, secs)):
        try:
            sleep(secs)
        except (ValueError, TypeError, OverflowError) as error:
            said.append(f"{type(error).__name__}: {error}")
    one, other = said
    return one, other


def asks_the_real_one(secs: Any, _: Any) -> None:
    """In a thread that is no rank's."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(time.sleep, secs).result()


@pytest.mark.parametrize("secs", [-1, None, "1", float("nan"), float("inf"), threading.TIMEOUT_MAX * 2])
def test_what_real_sleep_refuses_is_refused(secs: Any, simulated: SimulatedWorld) -> None:
    ((one, other),) = simulated.run(refused, secs, ranks=1)
    assert one == other


def busy(context: RankContext) -> float:
    began = time.perf_counter()
    if context.rank == 0:
        sum(range(3_000_000))
    dist.barrier()
    return time.perf_counter() - began


def test_what_ranks_compute_takes_time_where_it_is_measured(simulated: SimulatedWorld) -> None:
    assert simulated.run(busy, ranks=2) == [0.0, 0.0]
    simulated.timing = Timing(measured=True)
    one, other = simulated.run(busy, ranks=2)
    assert 0.001 < one < 60
    assert other == pytest.approx(one, rel=0.5), "who computes nothing waits"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_takes_as_long_as_its_schedule_says(name: str, simulated: SimulatedWorld) -> None:
    count, times = 2 * virtuals(name, looped=2), Times(2.0, 3.0, 1.0)
    case = Case.parse(f"{name} r2 s{count} m4 split={','.join('1' * count)} model=mlp")
    ran = measure(case, simulated, steps=1, times=times).typical
    foretold = simulate(case.built, times)
    assert ran.makespan == foretold.makespan
    for spans, actions, starts in zip(ran.spans, case.built.ranks, foretold.starts, strict=True):
        assert [span.worked_from for span in spans if span.action in actions] == list(starts)
