"""Transports by what waits for what, and whether a program deadlocks under each.

A message is one node for both of its ends: it happens when both sides have come to it. Every model adds edges:

==========  ============================================================================================================
strict      a rank does one thing at a time, in its program's order: blocking sends and receives
rank        messages of a rank run one at a time, in posting order: NCCL with one communicator, eagerly initialised
pair        messages of two ranks with each other do, either way: NCCL, lazily initialised
directed    messages from one rank to another do: torch 2.15's communicators per edge
unlimited   any number is in flight: gloo with tags
==========  ============================================================================================================

In all but strict a rank computes on while messages are under way. A message starts after the last computation that its
rank issued before it, an action waits for the message that it uses, and a wait for the send that it names. Each model's
order contains the next one's, so what is free of deadlock under one is so under all below it. Only the last matches
messages by name; the others pair the k-th send of a channel with its k-th receive.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from pipeproof.pipeline.action import COMPUTE, SENDS, WAITS
from pipeproof.pipeline.columns import Columns, Ints, Mask
from pipeproof.pipeline.graph import Graph
from pipeproof.pipeline.lower import Program
from pipeproof.pipeline.messages import Messages, consumers


class Transport(StrEnum):
    """The models, from the one that waits most to the one that waits least."""

    STRICT = "strict"
    RANK = "rank"
    PAIR = "pair"
    DIRECTED = "directed"
    UNLIMITED = "unlimited"


Edges = tuple[Ints, Ints]  # before, after


@dataclass(frozen=True)
class Deadlock:
    """A shortest cycle of waits: entries of the program, each waiting for the next, the last for the first."""

    transport: Transport
    entries: tuple[int, ...]
    text: str


def deadlocks(program: Program) -> Mapping[Transport, Deadlock | None]:
    """A shortest cycle of waits under every model, or None where there is none. Linear, bar the search for cycles."""
    messages = Messages.of(program)
    named, in_order = messages.matched_by_name(), messages.matched_in_order()
    alike = all(np.array_equal(np.sort(a), np.sort(b)) for a, b in zip(named, in_order, strict=True))
    alike = alike and np.array_equal(messages.key[in_order[0]], messages.key[in_order[1]])
    found: dict[Transport, Deadlock | None] = {}
    free = False  # what one model allows, the next ones do
    for transport in Transport:
        if not (free and (alike or transport is not Transport.UNLIMITED)):
            matched = named if transport is Transport.UNLIMITED else in_order
            found[transport] = _deadlock(program, messages, matched, transport)
            free = found[transport] is None and _in_order(program, messages)
        else:
            found[transport] = None
    return found


def _in_order(program: Program, messages: Messages) -> bool:
    """Whether every receive comes before its use: else a program's order says nothing of what waits for what."""
    return bool((messages.receives < consumers(program, messages)).all())


def _deadlock(program: Program, messages: Messages, matched: Edges, transport: Transport) -> Deadlock | None:
    columns = program.columns
    sends, receives = matched
    node = _nodes(program)
    node[receives] = sends
    parts = [_in_row(columns, np.ones(len(columns), dtype=bool))]
    if transport is not Transport.STRICT:
        parts = [*_host(program, messages), *_queues(messages, transport)]
    before, after = (np.concatenate(side) for side in zip(*parts, strict=True))
    before, after = node[before], node[after]
    graph = Graph(len(columns), before[before != after], after[before != after])
    reached = graph.reached()
    if reached.all():
        return None
    cycle = graph.shortest_cycle(~reached)
    peer = {int(send): int(messages.peer[send]) for send in sends}
    return Deadlock(transport, tuple(cycle[::-1]), _told(columns, cycle[::-1], peer))


def _nodes(program: Program) -> Ints:
    """Every entry's node: its own, or for the second of two actions that overlap the first one's."""
    node = np.arange(len(program.columns))
    computes = np.flatnonzero(program.columns.is_kind(*COMPUTE))
    if len(computes) == len(program.schedule.nodes):
        node[computes] = computes[program.schedule.nodes]
    return node


def _in_row(columns: Columns, among: Mask) -> Edges:
    """Each of ``among`` before the next one of its rank."""
    entries = np.flatnonzero(among)
    together = columns.rank[entries[:-1]] == columns.rank[entries[1:]]
    return entries[:-1][together], entries[1:][together]


def _host(program: Program, messages: Messages) -> Iterator[Edges]:
    """What holds under every model but strict: computing in order, messages after it, what uses them after those."""
    columns = program.columns
    hosted = columns.is_kind(*COMPUTE, *WAITS)
    yield _in_row(columns, hosted)
    last = np.maximum.accumulate(np.where(hosted, np.arange(len(columns)), -1))
    ends = np.concatenate([messages.sends, messages.receives])
    ends = ends[last[ends] >= columns.bounds[columns.rank[ends]]]
    yield last[ends], ends
    users = consumers(program, messages)
    yield messages.receives[users >= 0], users[users >= 0]
    waits = np.flatnonzero(columns.is_kind(*WAITS) & (messages.key >= 0))
    sent = messages.first(messages.sends)[messages.key[waits]]
    yield sent[sent >= 0], waits[sent >= 0]


def _queues(messages: Messages, transport: Transport) -> Iterator[Edges]:
    """Each message end before the next one of the queue that its rank puts it in."""
    columns = messages.columns
    ends = np.sort(np.concatenate([messages.sends, messages.receives]))
    ways = np.zeros(len(ends)), messages.peer[ends], columns.is_kind(*SENDS)[ends]
    keys = {Transport.RANK: 1, Transport.PAIR: 2, Transport.DIRECTED: 3}.get(transport)
    if keys is None:
        return
    queue = (*reversed(ways[1:keys]), columns.rank[ends])
    order = np.lexsort((ends, *queue))
    same = np.ones(len(ends) - 1 if len(ends) else 0, dtype=bool)
    for key in queue:
        same &= key[order][:-1] == key[order][1:]
    yield ends[order][:-1][same], ends[order][1:][same]


def _told(columns: Columns, cycle: list[int], peer: Mapping[int, int]) -> str:
    """``rank 1 waits at 1F0 for 0SEND_F0 from rank 0 to rank 1, which waits for ...``."""
    computing = [k for k, entry in enumerate(cycle) if entry not in peer]
    start = computing[0] if computing else 0
    turned = cycle[start:] + cycle[:start]

    def name(entry: int) -> str:
        where = f"from rank {columns.rank[entry]} to rank {peer[entry]}" if entry in peer else ""
        return f"{columns.action(entry)} {where or f'on rank {columns.rank[entry]}'}"

    rest = ", which waits for ".join(map(name, [*turned[1:], turned[0]]))
    return f"rank {columns.rank[turned[0]]} waits at {columns.action(turned[0])} for {rest}"
