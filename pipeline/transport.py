"""Byte buffers between ranks: the protocol, and its torch.distributed implementation."""

import weakref
from collections import deque
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.pipeline.lanes import Lane, second_lane
from pipeproof.pipeline.waiting import DEFAULT_TIMEOUT_S, waiting


class TransportError(RuntimeError):
    """A failed send or receive; the text names the message and the other rank."""


class TransportTimeout(TransportError):
    """A message beyond its time limit."""


class Message(NamedTuple):
    """One message between this rank and ``peer``, known to both by ``tag``; ``name`` is for people: ``1RECV_F0``."""

    name: object
    peer: int
    tag: int

    def __str__(self) -> str:
        return f"{self.name} with rank {self.peer}"


class Transport(Protocol):
    """The runtime's view of a channel between ranks. A message is one byte tensor (uint8, one dimension).

    A wrapper that delays, reorders, records or damages messages is another Transport around this one.
    """

    @property
    def rank(self) -> int: ...

    @property
    def n_ranks(self) -> int: ...

    @property
    def in_order(self) -> bool:
        """True if messages between two ranks run in posting order, whatever their tags (NCCL)."""
        ...

    def send(self, message: Message, buffer: Tensor) -> None:
        """Start sending; return at once. ``buffer`` must stay unwritten before ``flush``."""
        ...

    def post(self, message: Message, nbytes: int) -> None:
        """Make room for ``message`` and start receiving; return at once."""
        ...

    def receive(self, message: Message) -> Tensor:
        """Wait for a posted message. Raises ``TransportTimeout`` after the bound."""
        ...

    def flush(self) -> None:
        """Wait until everything sent has arrived."""
        ...


class Alone:
    """The transport for a single rank, without peers."""

    rank = 0
    n_ranks = 1
    in_order = False

    def send(self, message: Message, buffer: Tensor) -> None:
        raise TransportError(f"{message}: there is only one rank")

    def post(self, message: Message, nbytes: int) -> None:
        raise TransportError(f"{message}: there is only one rank")

    def receive(self, message: Message) -> Tensor:
        raise TransportError(f"{message}: there is only one rank")

    def flush(self) -> None:
        return None


class DistributedTransport:
    """Messages over a torch.distributed process group.

    gloo carries host tensors, matched by tag; device tensors are staged through the host, which also lets several ranks
    share one device. Every other backend carries the device's own tensors, one device per rank, in posting order, as
    NCCL does. ``timeout_s`` bounds every wait. Every rank of the group must make one: over gloo, the first time, they
    connect a second time (lanes.py).
    """

    def __init__(
        self, group: dist.ProcessGroup, *, device: torch.device | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        self.rank = group.rank()
        self.n_ranks = group.size()
        self.in_order = dist.get_backend(group) != "gloo"
        self.timeout_s = timeout_s
        # torch.distributed keeps the group until destroy_process_group. A reference that outlives that call makes gloo
        # abort the interpreter on exit (observed with torch 2.13), so none is kept here.
        self._group_kept_by_torch = weakref.ref(group)
        self._down = second_lane(group)
        self._device = device or torch.device("cpu")
        # Where buffers live while they travel: gloo reads and writes host memory only.
        self._wire = self._device if self.in_order else torch.device("cpu")
        self._timeout = timedelta(seconds=timeout_s)
        self._posted: dict[Message, tuple[Tensor, dist.Work]] = {}
        self._in_flight: list[tuple[Message, Tensor, dist.Work]] = []
        # gloo's thread still holds a receive for a moment after it has woken whoever waits. Dropping it then blocks
        # until the thread lets go (a step of small messages took up to 1.5 times as long), so the last ones are kept
        # while others are expected.
        self._taken: deque[dist.Work] = deque(maxlen=2)

    def _lane(self, source: int, target: int) -> Lane:
        """The lane between two ranks: the group towards higher ranks, its second lane towards lower ones."""
        group = self._group_kept_by_torch()
        if group is None:
            raise TransportError("the process group is gone: a schedule works until destroy_process_group is called")
        return group if source < target or self._down is None else self._down

    def send(self, message: Message, buffer: Tensor) -> None:
        buffer = buffer.to(self._wire)
        work = self._lane(self.rank, message.peer).send([buffer], message.peer, message.tag)
        self._in_flight.append((message, buffer, work))

    def post(self, message: Message, nbytes: int) -> None:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._wire)
        work = self._lane(message.peer, self.rank).recv([buffer], message.peer, message.tag)
        self._posted[message] = (buffer, work)

    def receive(self, message: Message) -> Tensor:
        buffer, work = self._posted.pop(message)
        self._wait(message, work)
        if self._posted:
            self._taken.append(work)
        else:
            self._taken.clear()
        return buffer.to(self._device)

    def flush(self) -> None:
        in_flight, self._in_flight = self._in_flight, []
        for message, _, work in in_flight:
            self._wait(message, work)

    def _wait(self, what: Message, work: dist.Work) -> None:
        with waiting(what):
            try:
                work.wait(self._timeout)
            except RuntimeError as error:
                # gloo has one exception type for everything; its own words tell a bound from a lost peer.
                if "Timed out" in str(error) or "timeout" in str(error).lower():
                    raise TransportTimeout(
                        f"rank {self.rank} waited {self.timeout_s:g} s at {what}, which did not come: {error}"
                    ) from error
                raise TransportError(f"rank {self.rank} lost {what}: {error}") from error
