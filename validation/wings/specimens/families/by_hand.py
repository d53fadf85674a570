"""Messages posted by hand with torch.distributed, on simulated ranks alone; and their races: buffers written, read or
freed in flight, and works dropped without a wait.

Faults in such code depend on timing. Real ranks would show them by luck, so nothing is planted there.
"""

from collections.abc import Callable, Mapping
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.core.observe.per_rank_globals import ranks_share_process
from pipeproof.core.observe.wrappers import AroundTransport
from pipeproof.own.faults import Plant
from pipeproof.pipeline.action import Kind
from pipeproof.pipeline.step import Parts
from pipeproof.pipeline.transport import Message, Transport
from pipeproof.wings.specimens.planting import To, gradients_of, on_transport, on_work
from pipeproof.wings.specimens.specimen import Entry

SENT, RECEIVED = To(Kind.SEND_F, 0), To(Kind.RECV_F, 1)


def where_simulated(plant: Plant) -> Plant:
    """``plant`` on simulated ranks, and nothing on real ones."""
    return lambda parts: plant(parts) if ranks_share_process() else parts


class ByHand(AroundTransport):
    """Send the first stage's activations by hand: each has its own buffer, and every work is waited for.

    A ``way`` replaces a method or an attribute; a subclass is one with a state.
    """

    sent: tuple[To, ...] = (SENT,)
    received: tuple[To, ...] = (RECEIVED,)

    def __init__(self, inner: Transport, **way: Any) -> None:
        super().__init__(inner)
        vars(self).update({name: MethodType(one, self) if callable(one) else one for name, one in way.items()})
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


def by_hand(kind: type[ByHand] = ByHand, **way: Any) -> Plant:
    """Send messages by this kind of hand, and in this ``way``, on simulated ranks."""
    return where_simulated(on_transport(lambda transport, schedule: kind(transport, **way)))


def plant_beside(change: Callable[..., None], **way: Any) -> Plant:
    """Do this before tied gradients are reduced, in this ``way``, on simulated ranks."""
    return where_simulated(on_work(before=partial(change, **way)))


def gradients_on(parts: Parts) -> list[Tensor]:
    """Return a rank's gradients."""
    return [gradient for stage in parts.stages for gradient in gradients_of(stage.module)]


def scale_gradients(parts: Parts, factor: float) -> None:
    """Multiply gradients."""
    for gradient in gradients_on(parts):
        gradient.mul_(factor)


class _OneBuffer(ByHand):
    """Copies each sent tensor into one buffer, without waiting before reuse."""

    out: Tensor | None = None

    def sends(self, message: Message, buffer: Tensor) -> None:
        self.out = torch.empty_like(buffer) if self.out is None else self.out
        self.out.copy_(buffer)
        super().sends(message, self.out)


class _TwoBuffers(ByHand):
    """Two buffers take turns. Each is waited for, but not before the next message is in it."""

    waits_first = False

    def sends(self, message: Message, buffer: Tensor) -> None:
        work, out = self.sending.pop(0) if len(self.sending) == 2 else (None, torch.empty_like(buffer))
        if self.waits_first and work is not None:
            work.wait()
        out.copy_(buffer)
        if not self.waits_first and work is not None:
            work.wait()
        super().sends(message, out)


def _divide(own: ByHand, message: Message, buffer: Tensor, *, copies: bool = False) -> None:
    """Divide a sent tensor, or its copy, by the number of microbatches, in place."""
    ByHand.sends(own, message, buffer)
    numbers = buffer.view(torch.float32)
    (numbers.clone() if copies else numbers).div_(2)


def _free(own: ByHand, message: Message, buffer: Tensor, *, waits_first: bool = False) -> None:
    """Free an output after its send, because only the graph is needed; a tensor with one element replaces it."""
    out = buffer.clone()
    ByHand.sends(own, message, out)
    if waits_first:
        own.sending[-1][0].wait()
    out.data = torch.empty(1, dtype=out.dtype)


def _copy_nothing(own: ByHand, message: Message, buffer: Tensor) -> None:
    """Take ``contiguous()`` for a copy; for rows with one element it copies nothing."""
    turned = buffer.view(-1, 1).t().contiguous().t()
    ByHand.sends(own, message, turned.reshape(-1))
    buffer.zero_()


class _Bucket(ByHand):
    """Sends views of one bucket, and clears it for the next messages."""

    bucket: Tensor | None = None
    used = 0

    def sends(self, message: Message, buffer: Tensor) -> None:
        size = len(buffer)
        if self.bucket is None:
            self.bucket = torch.empty(2 * size, dtype=torch.uint8)
        if self.used == 2:
            self.bucket.zero_()
            self.used = 0
        place = self.bucket[self.used * size : (self.used + 1) * size]
        place.copy_(buffer)
        self.used += 1
        super().sends(message, place)


def _let_go(own: ByHand, message: Message, buffer: Tensor, *, keeps: int) -> None:
    """Keep the works of the last few sends only."""
    ByHand.sends(own, message, buffer)
    del own.sending[: len(own.sending) - keeps]


def _read_early(own: ByHand, message: Message) -> Tensor:
    """Pass a received tensor on, and wait at the end of the step."""
    own.sending.append(own.posted.pop(message))
    return own.sending[-1][1]


def _poll(own: ByHand, message: Message, *, waits: bool = False) -> Tensor:
    """Ask once for a message's arrival, and go on, or wait if late."""
    work, buffer = own.posted.pop(message)
    if not work.is_completed() and waits:
        work.wait()
    return buffer


class _LastOfBatch(ByHand):
    """Receives a message in two halves, in one batch; waits for the last work alone."""

    waited = slice(-1, None)

    def sends(self, message: Message, buffer: Tensor) -> None:
        works = self._batch(dist.isend, message, buffer)
        self.sending += [(work, buffer) for work in works]

    def posts(self, message: Message, nbytes: int) -> None:
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        self.posted[message] = self._batch(dist.irecv, message, buffer), buffer

    def takes(self, message: Message) -> Tensor:
        works, buffer = self.posted.pop(message)
        for work in works[self.waited]:
            work.wait()
        return buffer

    def _batch(self, post: Any, message: Message, buffer: Tensor) -> list[Any]:
        halves = enumerate(buffer.chunk(2))
        return dist.batch_isend_irecv(
            [dist.P2POp(post, half, message.peer, tag=message.tag + k * 10**6) for k, half in halves]
        )


class _OneBehind(ByHand):
    """Keeps works in a list, and waits for the previous message's."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.works: list[Any] = []
        self.taken = 0

    def posts(self, message: Message, nbytes: int) -> None:
        super().posts(message, nbytes)
        self.works.append(self.posted[message][0])

    def takes(self, message: Message) -> Tensor:
        self.works[max(self.taken - 1, 0)].wait()
        self.taken += 1
        return self.posted.pop(message)[1]


class _ReceivedTwice(ByHand):
    """Receives into one buffer, and posts the next receive before the last arrives."""

    into: Tensor | None = None

    def posts(self, message: Message, nbytes: int) -> None:
        self.into = torch.empty(nbytes, dtype=torch.uint8) if self.into is None else self.into
        self.posted[message] = dist.irecv(self.into, message.peer, tag=message.tag), self.into


def _clear_late(own: ByHand, message: Message, nbytes: int) -> None:
    """Clear a buffer after posting its receive, losing an early arrival."""
    ByHand.posts(own, message, nbytes)
    own.posted[message][1].zero_()


def _take_back(own: ByHand, message: Message, nbytes: int) -> None:
    """Reuse the memory of unused buffers, counting use from the first read."""
    ByHand.posts(own, message, nbytes)
    for _, buffer in own.posted.values():
        buffer.untyped_storage().resize_(0)


def _post_doubles(own: ByHand, message: Message, nbytes: int) -> None:
    """Receive a wrong type with as many bytes, so that a transport counting bytes accepts it."""
    buffer = torch.empty(nbytes // 8, dtype=torch.float64)
    work = dist.irecv(buffer, message.peer, tag=message.tag)
    own.posted[message] = work, buffer.view(torch.uint8)


class _FirstSize(ByHand):
    """Expects every message in the size of the first."""

    size: int | None = None

    def posts(self, message: Message, nbytes: int) -> None:
        self.size = nbytes if self.size is None else self.size
        super().posts(message, self.size)


PLANTS: Mapping[str, Plant | Entry] = {
    "send-buffer-reused": by_hand(_OneBuffer),
    "send-waited-for-late": by_hand(_TwoBuffers),
    "sent-and-divided": by_hand(sends=_divide),
    "sent-and-freed": by_hand(sends=_free),
    "contiguous-is-no-copy": by_hand(sends=_copy_nothing),
    "bucket-cleared": by_hand(_Bucket),
    "send-let-go": by_hand(sends=partial(_let_go, keeps=0)),
    "handle-overwritten": by_hand(sends=partial(_let_go, keeps=1)),
    "receive-not-waited-for": by_hand(takes=_read_early),
    "polled-once": by_hand(takes=_poll),
    "last-of-batch-waited": by_hand(_LastOfBatch),
    "waited-one-behind": by_hand(_OneBehind),
    "receives-into-one-buffer": by_hand(_ReceivedTwice),
    "receive-buffer-cleared": by_hand(posts=_clear_late),
    "pool-takes-back": by_hand(posts=_take_back),
    "received-as-doubles": by_hand(posts=_post_doubles),
    "received-at-first-size": by_hand(_FirstSize),
    "by-hand": by_hand(),
    "two-buffers-in-turn": by_hand(_TwoBuffers, waits_first=True),
    "copy-divided": by_hand(sends=partial(_divide, copies=True)),
    "freed-in-time": by_hand(sends=partial(_free, waits_first=True)),
    "polled-and-waited-for": by_hand(takes=partial(_poll, waits=True)),
    "batch-waited-for-as-one": by_hand(_LastOfBatch),
    "whole-batch-waited-for": by_hand(_LastOfBatch, waited=slice(None)),
}
