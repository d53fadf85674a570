"""Transports by their waits.

``RULES`` is their table: the static models of ``deadlock`` follow it, and so do messages of the simulated world.

A message is one node for both of its ends: it happens when both sides have come to it. Every model adds edges:

========== ============================================================================================================
strict a rank does one thing at a time, in its program's order: blocking sends and receives rank messages of a rank run
one at a time, in posting order: NCCL with one communicator, eagerly initialised pair messages of two ranks with each
other do, either way: NCCL, lazily initialised directed messages from one rank to another do: torch 2.15's communicators
per edge unlimited any number is in flight: gloo with tags buffered so, and a send is done when it is issued: whoever
waits for it does not wait for its receive ==========
============================================================================================================

In all but strict a rank computes on while messages are under way. A message starts after the last computation that its
rank issued before it, an action waits for the message that it uses, and a wait for the send that it names. Each model's
order contains the next one's, so freedom from deadlock under one holds under all below it. Only the last two match
messages by name; the others pair the k-th send of a channel with its k-th receive.

Those others may have room: they keep so many messages from one rank to another until receipt, and a send ends once its
message is kept. Without room it ends with its receive. NCCL and MPI keep small messages; neither promises how many.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from types import MappingProxyType


class Transport(StrEnum):
    """Models, from most waits to fewest."""

    STRICT = "strict"
    RANK = "rank"
    PAIR = "pair"
    DIRECTED = "directed"
    UNLIMITED = "unlimited"
    BUFFERED = "buffered"


class Queue(IntEnum):
    """Scope of a queue with messages one at a time: how many properties separate a rank's queues."""

    NONE = 0  # nothing: there is no queue
    RANK = 1  # all of a rank's
    PAIR = 2  # all between two ranks, either way
    DIRECTED = 3  # all from one rank to another


@dataclass(frozen=True)
class Rules:
    """A transport's rules for messages.

    by_name: an end meets the other end of its name, or tag; else the k-th send of a channel meets its k-th receive.
    queue: which messages run one at a time, in posting order. blocking: a rank that posts one waits for it, there and
    then. buffered: a send is done when it is posted. keeps_sent: sent data is kept until it arrives, even if the
    program drops the send's work. one_stream: a rank's requests to a communicator share one stream, in which messages
    of a batch end as one, and each collective follows the one before. backend: torch.distributed's name for it.
    known_as: its everyday names. source: the evidence.
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
        """True if ``wait()`` makes the device wait, and the program goes on."""
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
    """An unknown transport name."""


def transport_of(name: str) -> Transport:
    """Find a transport by name, or by everyday name: ``gloo`` is unlimited. Raises ``TransportNameError``."""
    for transport, rules in RULES.items():
        if name in (transport.value, *rules.known_as):
            return transport
    known = ", ".join(word for one, rules in RULES.items() for word in (*rules.known_as, one.value))
    raise TransportNameError(f"transport {name!r} is unknown: expected one of {known}")


def everyday(transport: Transport) -> str:
    """Everyday name: ``gloo`` for unlimited."""
    return (*RULES[transport].known_as, transport.value)[0]


def keeps_none(transport: Transport) -> str:
    """Say why room does not apply to a transport; empty if it does."""
    if not RULES[transport].by_name:
        return ""
    others = ", ".join(everyday(one) for one, rules in RULES.items() if not rules.by_name)
    return f"transport {everyday(transport)} has no room to speak of: expected one of {others}"
