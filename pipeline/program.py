"""Lowering: from compute actions to a program with sends and receives; messages with the actions at their ends."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from pipeproof.pipeline.action import COMPUTE, GIVES_INPUT_GRADIENT, RECEIVES, SENDS, Action, Kind
from pipeproof.pipeline.cells import Cells, read_cells, write_cells
from pipeproof.pipeline.columns import CODE, Columns, Ints
from pipeproof.pipeline.dataflow import need_of, product_of, suppliers
from pipeproof.pipeline.schedule import Schedule, ScheduleError, schedule_of
from pipeproof.pipeline.timeline import simulate


@dataclass(frozen=True)
class Program:
    """A schedule after lowering: per rank, compute actions with sends and receives between them.

    A receive's place is its post; the consuming action waits for it. A send's place is its issue; it stays in flight
    until the step ends.
    """

    schedule: Schedule
    columns: Columns

    @cached_property
    def ranks(self) -> tuple[tuple[Action, ...], ...]:
        """Every rank's actions, in order."""
        return self.columns.rows()

    @cached_property
    def forward_only(self) -> "Program":
        """Keep forwards and their messages, in order: for evaluation."""
        keep = self.columns.is_kind(Kind.FORWARD, Kind.SEND_F, Kind.RECV_F)
        return Program(self.schedule, self.columns.take(keep))

    @cached_property
    def with_waits(self) -> "Program":
        """Add a wait for every send: torch 2.15's dialect.

        A sent output is awaited right after the same stage's own backward, which proves its use on the other side; a
        sent gradient, without such a proof, at the end.
        """
        waits = {Kind.SEND_F: Kind.WAIT_SEND_F, Kind.SEND_B: Kind.WAIT_SEND_B}
        rows = []
        for actions in self.ranks:
            sent = {action: None for action in actions if action.kind in SENDS}
            row: list[Action] = []
            for action in actions:
                row.append(action)
                output = Action(action.stage, Kind.SEND_F, action.microbatch)
                if action.kind in GIVES_INPUT_GRADIENT and output in sent:
                    del sent[output]
                    row.append(output._replace(kind=Kind.WAIT_SEND_F))
            rows.append([*row, *(action._replace(kind=waits[action.kind]) for action in sent)])
        return Program(self.schedule, Columns.of(rows))

    def to_csv(self) -> str:
        """One row per rank, one action per cell: torch's ``compute_comms`` format.

        It is 2.13's dialect, or 2.15's where the program has waits. Actions that overlap are one cell.
        """
        columns = self.schedule.columns
        pairs = {
            tuple(columns.action(int(columns.bounds[rank]) + slot + k) for k in (0, 1))
            for rank, slot in self.schedule.overlaps
        }
        both = (
            (rank, slot)
            for rank, row in enumerate(self.ranks)
            for slot, pair in enumerate(pairwise(row))
            if pairs and pair in pairs
        )
        return write_cells(Cells(self.ranks, tuple(both), self.schedule.shard_actions))


def program_from_csv(text: str, *, name: str = "csv") -> Program:
    """Read torch's ``compute_comms`` format, in either dialect; inverts ``Program.to_csv``.

    The schedule is its compute actions, read as ``schedule_from_csv`` reads them. Laws are not checked here
    (``pipeproof.pipeline.program_laws``). Raises ``ScheduleError``.
    """
    return program_of(read_cells(text), name=name)


def program_of(cells: Cells, *, name: str) -> Program:
    """Build a program from ``cells`` with messages. Raises ``ScheduleError``."""
    columns = Columns.of(cells.rows)
    compute = columns.is_kind(*COMPUTE)
    before: Ints = np.cumsum(compute) - compute
    first = columns.take(compute).bounds[columns.rank]
    slots = (before - first).tolist()
    overlaps = tuple((rank, slots[int(columns.bounds[rank]) + slot]) for rank, slot in cells.overlaps)
    computed = replace(cells, rows=columns.take(compute).rows(), overlaps=overlaps)
    return Program(schedule_of(computed, name=name), columns)


def read_csv(text: str, *, name: str = "csv") -> Schedule | Program:
    """Read a program if ``text`` contains messages, else a schedule. Raises ``ScheduleError``."""
    return parse_cells(read_cells(text), name=name)


def parse_cells(cells: Cells, *, name: str) -> Schedule | Program:
    """Build a program if ``cells`` contain messages, else a schedule. Raises ``ScheduleError``."""
    messages = any(action.kind not in COMPUTE for row in cells.rows for action in row)
    return program_of(cells, name=name) if messages else schedule_of(cells, name=name)


def lower(schedule: Schedule, *, early: int = 0) -> Program:
    """Add a send after each action whose product another rank needs, and the matching receive.

    Both ends of a message enter their ranks' lists at one instant of one global order (that of a simulation with unit
    times). Every rank's list is then a restriction of that one order, so no cycle of waits can arise under any
    transport, even a strict rendezvous on a single queue, and every channel delivers in the order in which it was
    written. The construction is that of torch's ``_add_send_recv``.

    ``early`` moves each receive up by so many compute actions of its rank, never past another receive: right for
    transports that match messages by name (gloo with tags), not for those that run messages in posting order (NCCL).
    """
    if early < 0:
        raise ScheduleError(f"early is {early}: expected at least 0, for a receive cannot be posted after it is needed")
    columns = _in_global_order(schedule)
    return Program(schedule, columns.take(_hoist(columns, early)) if early else columns)


def message_of(action: Action, schedule: Schedule) -> tuple[Action, Action, int] | None:
    """Send and receive for ``action``'s product, and the receiving rank; None if it stays put."""
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


def _in_global_order(schedule: Schedule) -> Columns:
    """Order compute actions by start, messages by their maker's end; at one time, messages first.

    So a receive is posted before it is needed. Overlapping actions stay together: they start and end as one.
    """
    columns, nodes = schedule.columns, schedule.nodes
    timeline = simulate(schedule)
    starts, ends = (np.fromiter(chain.from_iterable(times), int) for times in (timeline.starts, timeline.ends))
    leaves = np.zeros_like(ends)
    np.maximum.at(leaves, nodes, ends)
    supplier = suppliers(columns, schedule.n_stages)
    consumer = np.flatnonzero(supplier >= 0)
    consumer = consumer[columns.rank[supplier[consumer]] != columns.rank[consumer]]
    producer = supplier[consumer]
    forward = columns.is_kind(Kind.FORWARD)[producer]
    send = np.where(forward, CODE[Kind.SEND_F], CODE[Kind.SEND_B])
    receive = np.where(forward, CODE[Kind.RECV_F], CODE[Kind.RECV_B])
    everything = np.concatenate([np.arange(len(columns)), producer, consumer])
    kind = np.concatenate([columns.kind, send, receive])
    # One number per moment: unit times are whole, and the producer's entry tells messages of one time apart.
    message = 2 * leaves[nodes[producer]] * len(columns) + producer
    compute = (2 * starts[nodes] + 1) * len(columns) + np.arange(len(columns))
    when = np.concatenate([compute, message, message])
    order = np.lexsort((when, columns.rank[everything]))
    return replace(columns.take(everything[order]), kind=kind[order].astype(columns.kind.dtype))


def _hoist(columns: Columns, early: int) -> Ints:
    """Move every receive up to just before the ``early``-th compute action above it, or the first."""
    places = np.arange(len(columns))
    computes, receives = columns.is_kind(*COMPUTE), columns.is_kind(*RECEIVES)
    for start, end in columns.spans():
        at = start + np.flatnonzero(computes[start:end])
        moving = start + np.flatnonzero(receives[start:end])
        places[moving] = at[np.maximum(0, np.searchsorted(at, moving) - early)]
    # Sorting is stable, so receives keep their order among themselves.
    return np.lexsort((~receives, places))


class Delivery(NamedTuple):
    """A product from ``maker`` on rank ``sender``, as ``send`` and ``receive``, to ``user`` on rank ``receiver``."""

    maker: Action
    send: Action
    receive: Action
    user: Action
    sender: int
    receiver: int


def deliveries(schedule: Schedule) -> Iterator[Delivery]:
    """Messages of a lawful ``schedule``, in the order of their use."""
    makers = {product_of(action): action for action in chain.from_iterable(schedule.ranks)}
    for receiver, actions in enumerate(schedule.ranks):
        for user in actions:
            need = need_of(user, schedule.n_stages)
            message = message_of(makers[need], schedule) if need is not None else None
            if message is not None:
                send, receive, _ = message
                yield Delivery(makers[need], send, receive, user, schedule.placement[send.stage], receiver)
