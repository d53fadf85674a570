"""Messages as one posts them by hand with torch.distributed, and where: on simulated ranks alone.

What is wrong with such code depends on timing. On real ranks nothing is planted, for there it would show by luck.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.cases.specimens.planting import To, on_transport
from pipeproof.cases.specimens.specimen import Plant
from pipeproof.observers.wrappers import AroundTransport
from pipeproof.pipeline.action import Kind
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.transport import Message, Transport
from pipeproof.worlds.simulated.group import Net

T = TypeVar("T")
SENT, RECEIVED = To(Kind.SEND_F, 0), To(Kind.RECV_F, 1)


def where_simulated(change: Callable[[T], T]) -> Callable[[T], T]:
    """``change`` on simulated ranks, and nothing on real ones."""
    return lambda what: what if Net.current is None else change(what)


class ByHand(AroundTransport):
    """Activations of the first stage go by hand: each has a buffer of its own, and every work is waited for.

    Subclasses do one thing otherwise.
    """

    sent, received = SENT, RECEIVED

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.sending: list[tuple[Any, Tensor]] = []
        self.posted: dict[Message, tuple[Any, Tensor]] = {}

    def send(self, message: Message, buffer: Tensor) -> None:
        if message in self.sent:
            self.sends(message, buffer)
        else:
            self.inner.send(message, buffer)

    def post(self, message: Message, nbytes: int) -> None:
        if message in self.received:
            self.posts(message, nbytes)
        else:
            self.inner.post(message, nbytes)

    def receive(self, message: Message) -> Tensor:
        return self.takes(message) if message in self.received else self.inner.receive(message)

    def flush(self) -> None:
        self.ends()
        self.inner.flush()

    def sends(self, message: Message, buffer: Tensor) -> None:
        """Start sending."""
        self.sending.append((dist.isend(buffer, message.peer, tag=message.tag), buffer))

    def posts(self, message: Message, nbytes: int) -> None:
        """Start receiving."""
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        self.posted[message] = dist.irecv(buffer, message.peer, tag=message.tag), buffer

    def takes(self, message: Message) -> Tensor:
        """What has come."""
        work, buffer = self.posted.pop(message)
        work.wait()
        return buffer

    def ends(self) -> None:
        """Everything that was sent has left."""
        while self.sending:
            work, _ = self.sending.pop(0)
            work.wait()


def by_hand(kind: Callable[[Transport], Transport]) -> Plant:
    """Messages go by this kind of hand, where ranks are simulated."""

    def wrap(transport: Transport, schedule: Schedule) -> Transport:
        return kind(transport)

    return where_simulated(on_transport(wrap))
