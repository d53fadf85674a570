"""Deadlocks of a program under each transport: cycles of waits, by the rules in ``transports``."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from pipeproof.pipeline.action import COMPUTE, SENDS, WAITS
from pipeproof.pipeline.columns import Columns, Ints, Mask
from pipeproof.pipeline.graph import Graph
from pipeproof.pipeline.messages import Messages, consumers
from pipeproof.pipeline.program import Program
from pipeproof.pipeline.transports import RULES, Queue, Rules, Transport

Edges = tuple[Ints, Ints]  # before, after


@dataclass(frozen=True)
class Deadlock:
    """A shortest cycle of waits: program entries, each waiting for the next, the last for the first."""

    transport: Transport
    entries: tuple[int, ...]
    text: str


def deadlocks(program: Program, *, room: int = 0) -> Mapping[Transport, Deadlock | None]:
    """Find a shortest cycle of waits under every model, or None. Linear, bar the search for cycles.

    room: how many messages from one rank to another fit, in order.
    """
    messages = Messages.of(program)
    named, in_order = messages.match_by_name(), messages.match_in_order()
    alike = all(np.array_equal(np.sort(a), np.sort(b)) for a, b in zip(named, in_order, strict=True))
    alike = alike and np.array_equal(messages.key[in_order[0]], messages.key[in_order[1]])
    found: dict[Transport, Deadlock | None] = {}
    free = False  # a program free under one model is free under the next ones
    for transport in Transport:
        by_name = RULES[transport].by_name
        if not (free and (alike or not by_name)):
            matched = named if by_name else in_order
            found[transport] = _deadlock(program, messages, matched, transport, room=0 if by_name else room)
            free = found[transport] is None and not room and _in_order(program, messages)
        else:
            found[transport] = None
    return found


def least_room(program: Program, transport: Transport) -> int | None:
    """The least room for messages that frees a program from deadlock; None if no room does.

    Linear, times the logarithm of the number of messages.
    """
    messages = Messages.of(program)
    matched, most = messages.match_in_order(), len(messages.sends)

    def ends(room: int) -> bool:
        return bool(_waits(program, messages, matched, transport, room=room).reach().all())

    if RULES[transport].by_name or not ends(most):
        return None
    return bisect_left(range(1, most), True, key=ends) + 1


def _in_order(program: Program, messages: Messages) -> bool:
    """True if every receive precedes its use: else the order shows no waits."""
    return bool((messages.receives < consumers(program, messages)).all())


def _deadlock(
    program: Program, messages: Messages, matched: Edges, transport: Transport, *, room: int
) -> Deadlock | None:
    columns = program.columns
    sends, receives = matched
    graph = _waits(program, messages, matched, transport, room=room)
    reached = graph.reach()
    if reached.all():
        return None
    cycle = graph.shortest_cycle(~reached)
    ways = {int(send): (int(columns.rank[send]), int(messages.peer[send])) for send in sends}
    ways |= {int(end): (int(messages.peer[end]), int(columns.rank[end])) for end in receives}
    return Deadlock(transport, tuple(cycle[::-1]), _describe_cycle(columns, cycle[::-1], ways))


def _waits(program: Program, messages: Messages, matched: Edges, transport: Transport, *, room: int) -> Graph:
    """Build the graph of precedence between entries."""
    columns = program.columns
    sends, receives = matched
    node = _nodes(program)
    if not room:
        node[receives] = sends
    parts = [_in_row(columns, np.ones(len(columns), dtype=bool))]
    rules = RULES[transport]
    if not rules.blocking:
        parts = [*_host(program, messages, rules), *_queues(messages, rules.queue)]
    parts += _message_edges(messages, matched, room) if room else []
    before, after = (np.concatenate(side) for side in zip(*parts, strict=True))
    before, after = node[before], node[after]
    return Graph(len(columns), before[before != after], after[before != after])


def _nodes(program: Program) -> Ints:
    """Every entry's node: its own, or for the second of two overlapping actions the first's."""
    node = np.arange(len(program.columns))
    computes = np.flatnonzero(program.columns.is_kind(*COMPUTE))
    if len(computes) == len(program.schedule.nodes):
        node[computes] = computes[program.schedule.nodes]
    return node


def _in_row(columns: Columns, among: Mask) -> Edges:
    """Each entry ``among`` before its rank's next."""
    entries = np.flatnonzero(among)
    together = columns.rank[entries[:-1]] == columns.rank[entries[1:]]
    return entries[:-1][together], entries[1:][together]


def _host(program: Program, messages: Messages, rules: Rules) -> Iterator[Edges]:
    """Edges in every model but strict: computation in order, messages after it, consumers after those."""
    columns = program.columns
    hosted = columns.is_kind(*COMPUTE, *WAITS)
    yield _in_row(columns, hosted)
    last = np.maximum.accumulate(np.where(hosted, np.arange(len(columns)), -1))
    ends = np.concatenate([messages.sends, messages.receives])
    ends = ends[last[ends] >= columns.bounds[columns.rank[ends]]]
    yield last[ends], ends
    users = consumers(program, messages)
    yield messages.receives[users >= 0], users[users >= 0]
    if rules.buffered:
        return
    waits = np.flatnonzero(columns.is_kind(*WAITS) & (messages.key >= 0))
    sent = messages.first(messages.sends)[messages.key[waits]]
    yield sent[sent >= 0], waits[sent >= 0]


def _message_edges(messages: Messages, matched: Edges, room: int) -> list[Edges]:
    """Each send before its receive, and each receive before the send that its message makes room for."""
    sends, receives = matched  # channel by channel, in order
    rank, peer = messages.columns.rank[sends], messages.peer[sends]
    together = (rank[room:] == rank[:-room]) & (peer[room:] == peer[:-room])
    return [(sends, receives), (receives[:-room][together], sends[room:][together])]


def _queues(messages: Messages, queue: Queue) -> Iterator[Edges]:
    """Each message end before the next in its rank's queue."""
    columns = messages.columns
    ends = np.sort(np.concatenate([messages.sends, messages.receives]))
    ways = np.zeros(len(ends)), messages.peer[ends], columns.is_kind(*SENDS)[ends]
    if queue is Queue.NONE:
        return
    shared = (*reversed(ways[1:queue]), columns.rank[ends])
    order = np.lexsort((ends, *shared))
    same = np.ones(len(ends) - 1 if len(ends) else 0, dtype=bool)
    for key in shared:
        same &= key[order][:-1] == key[order][1:]
    yield ends[order][:-1][same], ends[order][1:][same]


def _describe_cycle(columns: Columns, cycle: list[int], ways: Mapping[int, tuple[int, int]]) -> str:
    """``rank 1 waits at 1F0 for 0SEND_F0 from rank 0 to rank 1, which waits for ...``."""
    computing = [k for k, entry in enumerate(cycle) if entry not in ways]
    start = computing[0] if computing else 0
    turned = cycle[start:] + cycle[:start]

    def name(entry: int) -> str:
        where = "from rank {} to rank {}".format(*ways[entry]) if entry in ways else f"on rank {columns.rank[entry]}"
        return f"{columns.action(entry)} {where}"

    rest = ", which waits for ".join(map(name, [*turned[1:], turned[0]]))
    return f"rank {columns.rank[turned[0]]} waits at {columns.action(turned[0])} for {rest}"
