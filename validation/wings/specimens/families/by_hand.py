"""Messages posted by hand with torch.distributed, on simulated ranks alone.

Faults in such code depend on timing. Real ranks would show them by luck, so nothing is planted there.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.core.observe.per_rank_globals import ranks_share_process
from pipeproof.core.observe.wrappers import AroundTransport
from pipeproof.own.faults import Plant
from pipeproof.pipeline.action import Kind
from pipeproof.pipeline.step import Parts
from pipeproof.pipeline.transport import Message, Transport
from pipeproof.pipeline.transports import Transport as Transports
from pipeproof.wings.specimens.planting import To, gradients_of, on_transport, on_work
from pipeproof.wings.specimens.specimen import Entry, Fault, Needs, Specimen, StageAt

T = TypeVar("T")
BOTH = (Transports.UNLIMITED, Transports.PAIR)
SENT, RECEIVED = To(Kind.SEND_F, 0), To(Kind.RECV_F, 1)


def where_simulated(change: Callable[[T], T]) -> Callable[[T], T]:
    """``change`` on simulated ranks, and nothing on real ones."""
    return lambda what: change(what) if ranks_share_process() else what


class ByHand(AroundTransport):
    """Send the first stage's activations by hand: each has its own buffer, and every work is waited for.

    Subclasses change one thing; a ``way`` of doing it is a class attribute.
    """

    sent: tuple[To, ...] = (SENT,)
    received: tuple[To, ...] = (RECEIVED,)

    def __init__(self, inner: Transport, **way: Any) -> None:
        super().__init__(inner)
        vars(self).update(way)
        self.sending: list[tuple[Any, Tensor]] = []
        self.posted: dict[Message, tuple[Any, Tensor]] = {}

    def send(self, message: Message, buffer: Tensor) -> None:
        if any(message in one for one in self.sent):
            self.sends(message, buffer)
        else:
            self.inner.send(message, buffer)

    def post(self, message: Message, nbytes: int) -> None:
        if self._comes_by_hand(message):
            self.posts(message, nbytes)
        else:
            self.inner.post(message, nbytes)

    def receive(self, message: Message) -> Tensor:
        return self.takes(message) if self._comes_by_hand(message) else self.inner.receive(message)

    def flush(self) -> None:
        self.ends()
        self.inner.flush()

    def _comes_by_hand(self, message: Message) -> bool:
        return any(message in one for one in self.received)

    def sends(self, message: Message, buffer: Tensor) -> None:
        """Start sending."""
        self.sending.append((dist.isend(buffer, message.peer, tag=message.tag), buffer))

    def posts(self, message: Message, nbytes: int) -> None:
        """Start receiving."""
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        self.posted[message] = dist.irecv(buffer, message.peer, tag=message.tag), buffer

    def takes(self, message: Message) -> Tensor:
        """Return the received message."""
        work, buffer = self.posted.pop(message)
        work.wait()
        return buffer

    def ends(self) -> None:
        """Wait until all messages have left."""
        while self.sending:
            work, _ = self.sending.pop(0)
            work.wait()


def by_hand(kind: type[ByHand], **way: Any) -> Plant:
    """Send messages by this kind of hand on simulated ranks."""
    return where_simulated(on_transport(lambda transport, schedule: kind(transport, **way)))


def plant_beside(change: Callable[..., None], **way: Any) -> Plant:
    """Do this before tied gradients are reduced, in this ``way``, on simulated ranks."""

    def reduce(parts: Parts) -> None:
        change(parts, **way)
        parts.gradients.reduce_tied()

    return where_simulated(on_work(reduce=reduce))


def gradients_on(parts: Parts) -> list[Tensor]:
    """Return a rank's gradients."""
    return [gradient for stage in parts.stages for gradient in gradients_of(stage.module)]


def scale_gradients(parts: Parts, factor: float) -> None:
    """Multiply gradients."""
    for gradient in gradients_on(parts):
        gradient.mul_(factor)


def row(fault: Fault, plant: Plant, *over: Transports, schedule: str = "", **needs: Any) -> Specimen:
    """Return a specimen of two ranks with an fp32 tensor between, over these transports; by default gloo and NCCL."""
    return Specimen(fault=fault, plant=plant, needs=_between_two(over, needs), schedule=schedule)


def control(plant: Plant, *over: Transports, schedule: str = "", **needs: Any) -> Entry:
    """Return the same code without its fault."""
    return Entry(plant=plant, needs=_between_two(over, needs), schedule=schedule)


def _between_two(over: tuple[Transports, ...], needs: Mapping[str, Any]) -> Needs:
    return replace(Needs(ranks=2, models=("mlp",), transports=over or BOTH), **needs)


def race_fault(kind: str, stage: StageAt) -> Fault:
    """Return the simulated world's name for the race, and its rank."""
    return Fault(kind, kind, stage=stage)


def hung(rank: int = 0) -> Fault:
    """Return a deadlock, reported at its first rank."""
    return Fault("deadlock", "deadlock", rank=rank)
