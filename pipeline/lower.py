"""Lowering: compute actions to a program with sends and receives."""

from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from pipeline.action import COMPUTE, RECEIVES, Action, Kind
from pipeline.dataflow import product_of
from pipeline.schedule import Schedule, ScheduleError, rows_to_csv
from pipeline.simulate import simulate

# A message event sorts before a compute event of the same time, so that a receive is posted before it is needed.
_MESSAGE, _COMPUTE = 0, 1
# When, message or compute, the producer's rank and slot (together unique), and what enters which rank's list.
_Event = tuple[float, int, int, int, tuple[tuple[int, Action], ...]]


@dataclass(frozen=True)
class Program:
    """A schedule after lowering: per rank, compute actions with the sends and receives between them.

    A receive's place is where it is posted; it is waited for by the action that consumes it. A send's place is where
    it is issued; it stays in flight until the step ends.
    """

    schedule: Schedule
    ranks: tuple[tuple[Action, ...], ...]

    @cached_property
    def forward_only(self) -> "Program":
        """The forwards and their messages alone, in the same order: for evaluation."""
        keep = (Kind.FORWARD, Kind.SEND_F, Kind.RECV_F)
        return Program(self.schedule, tuple(tuple(a for a in actions if a.kind in keep) for actions in self.ranks))

    def to_csv(self) -> str:
        """One row per rank, one action per cell: torch 2.13's ``compute_comms`` format."""
        return rows_to_csv(self.ranks)


def lower(schedule: Schedule, *, early: int = 0) -> Program:
    """Add a send after each action whose product another rank needs, and the receive that pairs with it.

    Both ends of a message enter their ranks' lists at one instant of one global order (that of a simulation with unit
    times). Every rank's list is then a restriction of that one order, so no cycle of waits can arise under any
    transport, even a strict rendezvous on a single queue, and every channel delivers in the order in which it was
    written. The construction is that of torch's ``_add_send_recv``.

    ``early`` moves each receive up by so many compute actions of its rank, never past another receive: right for
    transports that match messages by name (gloo with tags), not for those that run messages in posting order (NCCL).
    """
    if early < 0:
        raise ScheduleError(f"early is {early}: expected at least 0, for a receive cannot be posted after it is needed")
    rows: list[list[Action]] = [[] for _ in schedule.ranks]
    for *_, entries in sorted(_events(schedule)):
        for rank, action in entries:
            rows[rank].append(action)
    ranks = tuple(tuple(_hoist(row, early) if early else row) for row in rows)
    return Program(schedule, ranks)


def message_of(action: Action, schedule: Schedule) -> tuple[Action, Action, int] | None:
    """The send and the receive that carry ``action``'s product on, and the receiving rank; None if it stays put."""
    product = product_of(action)
    if product is None:
        return None
    forward = product.kind is Kind.FORWARD
    target = action.stage + (1 if forward else -1)
    if not 0 <= target < schedule.n_stages or schedule.placement[target] == schedule.placement[action.stage]:
        return None
    send = Action(action.stage, Kind.SEND_F if forward else Kind.SEND_B, action.microbatch)
    receive = Action(target, Kind.RECV_F if forward else Kind.RECV_B, action.microbatch)
    return send, receive, schedule.placement[target]


def _events(schedule: Schedule) -> Iterator[_Event]:
    timeline = simulate(schedule)
    for rank, actions in enumerate(schedule.ranks):
        for slot, action in enumerate(actions):
            yield timeline.starts[rank][slot], _COMPUTE, rank, slot, ((rank, action),)
            message = message_of(action, schedule)
            if message is not None:
                send, receive, peer = message
                yield timeline.ends[rank][slot], _MESSAGE, rank, slot, ((rank, send), (peer, receive))


def _hoist(row: list[Action], early: int) -> list[Action]:
    """``row`` with every receive moved up to just before the ``early``-th compute action above it, or the first."""
    computes = [slot for slot, action in enumerate(row) if action.kind in COMPUTE]

    def place(slot: int) -> tuple[int, int]:
        if row[slot].kind not in RECEIVES:
            return slot, 1
        return computes[max(0, bisect(computes, slot) - early)], 0

    # Sorting is stable, so receives keep their order among themselves.
    return [row[slot] for slot in sorted(range(len(row)), key=place)]
