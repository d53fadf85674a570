"""Every interleaving that differs runs once: as many as there are where all are tried."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist

from pipeproof.wings.simulated import SimulatedWorld
from pipeproof.wings.simulated.engine.decisions import Guide
from pipeproof.wings.simulated.engine.events import Event
from pipeproof.wings.simulated.engine.exploration import Course, Exploration, describe_explorations
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.golden import golden
from tests.support.sweeps import SWEEP

Job = Callable[[RankContext], object]


def passes_on(context: RankContext) -> list[float]:
    """Right: what is sent stays as it is until it has left, and what is received is waited for."""
    buffer = torch.ones(2) * (1 - context.rank)
    work: Any = dist.isend(buffer, 1) if context.rank == 0 else dist.irecv(buffer, 0)
    work.wait()
    buffer += 1
    return buffer.tolist()


def overwrites(context: RankContext) -> list[float]:
    """Rank 0 writes into what it sends, and nothing says that it has left."""
    buffer = torch.ones(2)
    work: Any = dist.isend(buffer, 1) if context.rank == 0 else dist.irecv(buffer, 0)
    if context.rank == 0:
        buffer += 1
    work.wait()
    return buffer.tolist()


def polls(context: RankContext) -> int:
    """How often rank 0 asks in vain: that is for the interleaving to say."""
    asked, buffer = 0, torch.zeros(2)
    work: Any = dist.isend(buffer, 0) if context.rank == 1 else dist.irecv(buffer, 1)
    while context.rank == 0 and not work.is_completed():
        asked += 1
    work.wait()
    return asked


def takes_from_any(context: RankContext) -> list[int]:
    """In which order rank 0 hears of the others."""
    if context.rank:
        dist.send(torch.ones(1), 0)
        return []
    return [dist.recv(torch.zeros(1)) for _ in range(context.ranks - 1)]


def counts(context: RankContext) -> int:
    """Which number a rank gets depends on who comes first."""
    store = dist.distributed_c10d._get_default_store()
    return int(store.add("how many", 1))


def outcomes(job: Job, world: World, ranks: int) -> tuple[set[str], Exploration]:
    world.most, observed = 500, set()
    for _ in world.interleavings():
        try:
            observed.add(str(world.run(job, ranks=ranks)))
        except RankFailed as failure:
            observed.add(type(failure.cause).__name__)
    return observed, world.explorations[-1]


@pytest.mark.parametrize(
    ("job", "ranks", "observed", "differ"),
    [
        (passes_on, 2, {"[[2.0, 2.0], [2.0, 2.0]]"}, 1),
        (overwrites, 2, {"Race", "[[2.0, 2.0], [1.0, 1.0]]"}, 2),
        (polls, 2, {"[0, 0]", "[1, 0]", "[2, 0]"}, 4),  # the third time, or soon after it
        (counts, 2, {"[1, 2]", "[2, 1]"}, 2),
        (takes_from_any, 2, {"[[1], []]"}, 1),
        (takes_from_any, 3, {"[[1, 2], [], []]", "[[2, 1], [], []]"}, 4),
    ],
)
def test_what_depends_on_the_order_is_seen(
    job: Job, ranks: int, observed: set[str], differ: int, simulated: SimulatedWorld
) -> None:
    found, exploration = outcomes(job, simulated, ranks)
    assert found == observed
    assert (exploration.found, exploration.complete, exploration.more) == (differ, True, False)
    golden(describe_explorations([exploration]))


class Everything(Exploration):
    """Tries whoever could have gone on, wherever somebody did: each interleaving, whether or not it differs."""

    def __init__(self) -> None:
        super().__init__(100_000)
        self.orders: set[frozenset[object]] = set()

    def learn(self, course: Course | None) -> None:
        super().learn(course)
        assert course is not None, "its runs end"
        self.orders.add(order(course.events))

    def _asleep(self) -> dict[Any, Event]:
        return {}

    def _reverse(self, first: int) -> None:
        begun = next(k for k, node in enumerate(self._nodes) if isinstance(node.event.actor, tuple))
        for node in self._nodes[begun + 1 :]:
            node.todo |= set(node.event.able)

    def _following(self) -> Guide | None:
        found = super()._following()
        return None if found is None else Guide(found.preemptions)


def order(events: Any) -> frozenset[object]:
    """What all runs that do not differ have in common: of events whose order matters, which was first."""
    done: dict[Any, int] = {}
    names = []
    for event in events:
        done[event.actor] = done.get(event.actor, 0) + 1
        names.append((event.actor, done[event.actor]))
    pairs = ((a, b) for b in range(len(events)) for a in range(b) if events[a].meets(events[b]))
    return frozenset((names[a], names[b]) for a, b in pairs) | frozenset(names)


def after_a_barrier(context: RankContext, job: Job) -> object:
    dist.barrier()  # all have come, so that only what follows is tried in every order
    return job(context)


@pytest.mark.parametrize(
    "job", [polls, counts, pytest.param(passes_on, marks=pytest.mark.long), pytest.param(overwrites, marks=SWEEP)]
)
def test_as_many_differ_as_where_all_are_tried(job: Job, simulated: SimulatedWorld) -> None:
    simulated.most = 500
    for _ in simulated.interleavings():
        _run(simulated, job)
    (exploration,) = simulated.explorations
    everything = Everything()
    for guide in everything.guides():
        simulated.seed, simulated.noted = guide, True
        _run(simulated, job)
        everything.learn(simulated.course)
    assert everything.complete
    assert everything.ran > exploration.found
    assert len(everything.orders) == exploration.found


def _run(world: World, job: Job) -> None:
    with suppress(RankFailed):  # a race, in some
        world.run(after_a_barrier, job, ranks=2)


def test_a_search_ends_where_there_are_more_than_wanted(simulated: SimulatedWorld) -> None:
    simulated.most = 2
    ran = [simulated.run(polls, ranks=2) for _ in simulated.interleavings()]
    assert len(ran) == 2
    (exploration,) = simulated.explorations
    assert not exploration.complete
    golden(describe_explorations([exploration]))


def test_whether_the_order_of_two_events_matters() -> None:
    asks, moves, other = (
        Event(actor, (), touches={thing: changes})
        for actor, thing, changes in ((0, "work", False), ((1, 0), "work", True), (2, "key", True))
    )
    assert asks.meets(moves)
    assert moves.meets(asks)
    assert moves.meets(moves)
    assert not asks.meets(asks)
    assert not asks.meets(other)
