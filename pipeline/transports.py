"""Transports by what waits for what, and whether a program deadlocks under each.

``RULES`` is the one table of them: the static models here follow it, and so do the simulated world's messages.

A message is one node for both of its ends: it happens when both sides have come to it. Every model adds edges:

==========  ============================================================================================================
strict      a rank does one thing at a time, in its program's order: blocking sends and receives
rank        messages of a rank run one at a time, in posting order: NCCL with one communicator, eagerly initialised
pair        messages of two ranks with each other do, either way: NCCL, lazily initialised
directed    messages from one rank to another do: torch 2.15's communicators per edge
unlimited   any number is in flight: gloo with tags
buffered    so, and a send is done when it is issued: whoever waits for it does not wait for its receive
==========  ============================================================================================================

In all but strict a rank computes on while messages are under way. A message starts after the last computation that its
rank issued before it, an action waits for the message that it uses, and a wait for the send that it names. Each model's
order contains the next one's, so what is free of deadlock under one is so under all below it. Only the last two match
messages by name; the others pair the k-th send of a channel with its k-th receive.

Those others may have room: they keep so much of what is sent from one rank to another until it is received, and a send
ends once its message is kept. Without room it ends with its receive. NCCL and MPI keep small messages; neither promises
how much of them.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from types import MappingProxyType

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
    BUFFERED = "buffered"


class Queue(IntEnum):
    """What shares a queue of messages that run one at a time: the number of things that tell queues of a rank apart."""

    NONE = 0  # nothing: there is no queue
    RANK = 1  # all of a rank's
    PAIR = 2  # those of two ranks, either way
    DIRECTED = 3  # those from one rank to another


@dataclass(frozen=True)
class Rules:
    """What a transport lets messages do.

    by_name: an end meets the other end of its name, or tag; else the k-th send of a channel meets its k-th receive.
    queue: which messages run one at a time, in the order in which they are posted. blocking: who posts one waits for
    it, there and then. buffered: a send is done when it is posted. keeps_sent: what is sent is kept until it is there,
    also where nobody keeps the send's work. one_stream: what a rank asks of a communicator has one stream, in
    which messages of a batch end as one, and each collective follows the one before. backend: what torch.distributed
    calls the like. known_as: its everyday names. source: where that is known from.
    """

    by_name: bool
    queue: Queue
    backend: str
    source: str
    blocking: bool = False
    buffered: bool = False
    one_stream: bool = False
    keeps_sent: bool = True
    known_as: tuple[str, ...] = ()

    @property
    def on_stream(self) -> bool:
        """Whether ``wait()`` makes a device wait in the program's place, which goes on."""
        return self.one_stream and not self.blocking


RULES: Mapping[Transport, Rules] = MappingProxyType(
    {
        Transport.STRICT: Rules(
            by_name=False,
            queue=Queue.NONE,
            backend="nccl",
            one_stream=True,
            source="the MPI standard's synchronous mode, MPI_Ssend: a send ends once its receive has begun",
            blocking=True,
            known_as=("rendezvous",),
        ),
        Transport.RANK: Rules(
            by_name=False,
            queue=Queue.RANK,
            backend="nccl",
            one_stream=True,
            source="ProcessGroupNCCL::getKeyForDevice: with eager connection one communicator and stream has all of a "
            "rank's messages",
        ),
        Transport.PAIR: Rules(
            by_name=False,
            queue=Queue.PAIR,
            backend="nccl",
            one_stream=True,
            source="ProcessGroupNCCL::pointToPoint: the key is the two ranks, the lower first; tags are not passed on",
            known_as=("nccl",),
        ),
        Transport.DIRECTED: Rules(
            by_name=False,
            queue=Queue.DIRECTED,
            backend="nccl",
            one_stream=True,
            source="torch.distributed.pipelining 2.15: a communicator for each edge and direction",
        ),
        Transport.UNLIMITED: Rules(
            by_name=True,
            queue=Queue.NONE,
            backend="gloo",
            source="gloo's tcp/pair.cc: a buffer's slot is its tag, and it is sent once its receive is announced; "
            "the work owns that buffer",
            keeps_sent=False,
            known_as=("gloo",),
        ),
        Transport.BUFFERED: Rules(
            by_name=True,
            queue=Queue.NONE,
            backend="gloo",
            source="the MPI standard's buffered mode, MPI_Bsend: a send ends whether or not there is a receive",
            buffered=True,
        ),
    }
)


class TransportNameError(ValueError):
    """A name that no transport has."""


def transport_of(name: str) -> Transport:
    """The transport of that name, or of that everyday name: ``gloo`` is unlimited. Raises ``TransportNameError``."""
    for transport, rules in RULES.items():
        if name in (transport.value, *rules.known_as):
            return transport
    known = ", ".join(word for one, rules in RULES.items() for word in (*rules.known_as, one.value))
    raise TransportNameError(f"transport {name!r} is unknown: expected one of {known}")


def everyday(transport: Transport) -> str:
    """What one calls it: ``gloo`` for unlimited."""
    return (*RULES[transport].known_as, transport.value)[0]


def keeps_none(transport: Transport) -> str:
    """Why room says nothing of a transport, in words; empty where it does."""
    if not RULES[transport].by_name:
        return ""
    others = ", ".join(everyday(one) for one, rules in RULES.items() if not rules.by_name)
    return f"transport {everyday(transport)} has no room to speak of: expected one of {others}"


Edges = tuple[Ints, Ints]  # before, after


@dataclass(frozen=True)
class Deadlock:
    """A shortest cycle of waits: entries of the program, each waiting for the next, the last for the first."""

    transport: Transport
    entries: tuple[int, ...]
    text: str


def deadlocks(program: Program, *, room: int = 0) -> Mapping[Transport, Deadlock | None]:
    """A shortest cycle of waits under every model, or None where there is none. Linear, bar the search for cycles.

    room: how many messages from one rank to another are kept, where they keep their order.
    """
    messages = Messages.of(program)
    named, in_order = messages.matched_by_name(), messages.matched_in_order()
    alike = all(np.array_equal(np.sort(a), np.sort(b)) for a, b in zip(named, in_order, strict=True))
    alike = alike and np.array_equal(messages.key[in_order[0]], messages.key[in_order[1]])
    found: dict[Transport, Deadlock | None] = {}
    free = False  # what one model allows, the next ones do
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
    """With room for how many messages at least a program that deadlocks does not; None where no room helps.

    Linear, times the logarithm of how many there are.
    """
    messages = Messages.of(program)
    matched, most = messages.matched_in_order(), len(messages.sends)

    def ends(room: int) -> bool:
        return bool(_waits(program, messages, matched, transport, room=room).reached().all())

    if RULES[transport].by_name or not ends(most):
        return None
    return bisect_left(range(1, most), True, key=ends) + 1


def _in_order(program: Program, messages: Messages) -> bool:
    """Whether every receive comes before its use: else a program's order says nothing of what waits for what."""
    return bool((messages.receives < consumers(program, messages)).all())


def _deadlock(
    program: Program, messages: Messages, matched: Edges, transport: Transport, *, room: int
) -> Deadlock | None:
    columns = program.columns
    sends, receives = matched
    graph = _waits(program, messages, matched, transport, room=room)
    reached = graph.reached()
    if reached.all():
        return None
    cycle = graph.shortest_cycle(~reached)
    ways = {int(send): (int(columns.rank[send]), int(messages.peer[send])) for send in sends}
    ways |= {int(end): (int(messages.peer[end]), int(columns.rank[end])) for end in receives}
    return Deadlock(transport, tuple(cycle[::-1]), _told(columns, cycle[::-1], ways))


def _waits(program: Program, messages: Messages, matched: Edges, transport: Transport, *, room: int) -> Graph:
    """Which entry comes before which."""
    columns = program.columns
    sends, receives = matched
    node = _nodes(program)
    if not room:
        node[receives] = sends
    parts = [_in_row(columns, np.ones(len(columns), dtype=bool))]
    rules = RULES[transport]
    if not rules.blocking:
        parts = [*_host(program, messages, rules), *_queues(messages, rules.queue)]
    parts += _kept(messages, matched, room) if room else []
    before, after = (np.concatenate(side) for side in zip(*parts, strict=True))
    before, after = node[before], node[after]
    return Graph(len(columns), before[before != after], after[before != after])


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


def _host(program: Program, messages: Messages, rules: Rules) -> Iterator[Edges]:
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
    if rules.buffered:
        return
    waits = np.flatnonzero(columns.is_kind(*WAITS) & (messages.key >= 0))
    sent = messages.first(messages.sends)[messages.key[waits]]
    yield sent[sent >= 0], waits[sent >= 0]


def _kept(messages: Messages, matched: Edges, room: int) -> list[Edges]:
    """Each send before its receive, and each receive of a channel before the send that its message leaves room for."""
    sends, receives = matched  # those of a channel one after the other, in order
    rank, peer = messages.columns.rank[sends], messages.peer[sends]
    together = (rank[room:] == rank[:-room]) & (peer[room:] == peer[:-room])
    return [(sends, receives), (receives[:-room][together], sends[room:][together])]


def _queues(messages: Messages, queue: Queue) -> Iterator[Edges]:
    """Each message end before the next one of the queue that its rank puts it in."""
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


def _told(columns: Columns, cycle: list[int], ways: Mapping[int, tuple[int, int]]) -> str:
    """``rank 1 waits at 1F0 for 0SEND_F0 from rank 0 to rank 1, which waits for ...``."""
    computing = [k for k, entry in enumerate(cycle) if entry not in ways]
    start = computing[0] if computing else 0
    turned = cycle[start:] + cycle[:start]

    def name(entry: int) -> str:
        where = "from rank {} to rank {}".format(*ways[entry]) if entry in ways else f"on rank {columns.rank[entry]}"
        return f"{columns.action(entry)} {where}"

    rest = ", which waits for ".join(map(name, [*turned[1:], turned[0]]))
    return f"rank {columns.rank[turned[0]]} waits at {columns.action(turned[0])} for {rest}"
