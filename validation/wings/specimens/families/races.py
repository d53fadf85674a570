"""Races: buffers written, read or freed in flight, and works dropped without a wait."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.pipeline.transport import Message
from pipeproof.pipeline.transports import Transport
from pipeproof.wings.specimens.families.by_hand import ByHand, by_hand, control, race_fault, row
from pipeproof.wings.specimens.planting import first, second
from pipeproof.wings.specimens.specimen import Entry, Specimen

_GLOO = Transport.UNLIMITED


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


class _Divided(ByHand):
    """Divides a sent tensor, or its copy, by the number of microbatches, in place."""

    copies = False

    def sends(self, message: Message, buffer: Tensor) -> None:
        super().sends(message, buffer)
        numbers = buffer.view(torch.float32)
        (numbers.clone() if self.copies else numbers).div_(2)


class _Freed(ByHand):
    """Frees an output after its send, because only the graph is needed; a tensor with one element replaces it."""

    waits_first = False

    def sends(self, message: Message, buffer: Tensor) -> None:
        out = buffer.clone()
        super().sends(message, out)
        if self.waits_first:
            self.sending[-1][0].wait()
        out.data = torch.empty(1, dtype=out.dtype)


class _NoCopy(ByHand):
    """Takes ``contiguous()`` for a copy; for rows with one element it copies nothing."""

    rows = 1

    def sends(self, message: Message, buffer: Tensor) -> None:
        turned = buffer.view(-1, self.rows).t().contiguous().t()
        super().sends(message, turned.reshape(-1))
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


class _SendLetGo(ByHand):
    """Keeps the works of the last few sends only."""

    keeps = 0

    def sends(self, message: Message, buffer: Tensor) -> None:
        super().sends(message, buffer)
        del self.sending[: len(self.sending) - self.keeps]


class _ReadEarly(ByHand):
    """Passes a received tensor on, and waits at the end of the step."""

    def takes(self, message: Message) -> Tensor:
        self.sending.append(self.posted.pop(message))
        return self.sending[-1][1]


class _Polled(ByHand):
    """Asks once for a message's arrival, and goes on, or waits if late."""

    waits = False

    def takes(self, message: Message) -> Tensor:
        work, buffer = self.posted.pop(message)
        if not work.is_completed() and self.waits:
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


class _ClearedLate(ByHand):
    """Clears a buffer after posting its receive, losing an early arrival."""

    def posts(self, message: Message, nbytes: int) -> None:
        super().posts(message, nbytes)
        self.posted[message][1].zero_()


class _Pool(ByHand):
    """Reuses the memory of unused buffers, counting use from the first read."""

    def posts(self, message: Message, nbytes: int) -> None:
        super().posts(message, nbytes)
        for _, buffer in self.posted.values():
            buffer.untyped_storage().resize_(0)


class _AsDoubles(ByHand):
    """Receives a wrong type with as many bytes, so that a transport counting bytes accepts it."""

    def posts(self, message: Message, nbytes: int) -> None:
        buffer = torch.empty(nbytes // 8, dtype=torch.float64)
        work = dist.irecv(buffer, message.peer, tag=message.tag)
        self.posted[message] = work, buffer.view(torch.uint8)


class _FirstSize(ByHand):
    """Expects every message in the size of the first."""

    size: int | None = None

    def posts(self, message: Message, nbytes: int) -> None:
        self.size = nbytes if self.size is None else self.size
        super().posts(message, self.size)


_row, _control = partial(row, schedule="gpipe"), partial(control, schedule="gpipe")

SPECIMENS: Mapping[str, Specimen] = {
    "send-buffer-reused": _row(race_fault("overwritten-in-flight", first), by_hand(_OneBuffer), microbatches=2),
    "send-waited-for-late": _row(race_fault("overwritten-in-flight", first), by_hand(_TwoBuffers), microbatches=3),
    "sent-and-divided": _row(race_fault("overwritten-in-flight", first), by_hand(_Divided)),
    "sent-and-freed": _row(race_fault("freed-in-flight", first), by_hand(_Freed)),
    "contiguous-is-no-copy": _row(race_fault("overwritten-in-flight", first), by_hand(_NoCopy)),
    "bucket-cleared": _row(race_fault("overwritten-in-flight", first), by_hand(_Bucket), microbatches=3),
    "send-let-go": _row(race_fault("never-waited", first), by_hand(_SendLetGo), _GLOO),
    "handle-overwritten": _row(race_fault("never-waited", first), by_hand(_SendLetGo, keeps=1), _GLOO, microbatches=2),
    "receive-not-waited-for": _row(race_fault("read-before-wait", second), by_hand(_ReadEarly)),
    "polled-once": _row(race_fault("read-before-wait", second), by_hand(_Polled)),
    "last-of-batch-waited": _row(race_fault("read-before-wait", second), by_hand(_LastOfBatch), _GLOO),
    "waited-one-behind": _row(race_fault("read-before-wait", second), by_hand(_OneBehind), microbatches=2),
    "receives-into-one-buffer": _row(
        race_fault("received-twice", second), by_hand(_ReceivedTwice), _GLOO, microbatches=2, plan=("train", "train")
    ),
    "receive-buffer-cleared": _row(race_fault("overwritten-in-flight", second), by_hand(_ClearedLate)),
    "pool-takes-back": _row(race_fault("freed-in-flight", second), by_hand(_Pool)),
    "received-as-doubles": _row(race_fault("mismatched", second), by_hand(_AsDoubles)),
    "received-at-first-size": _row(
        race_fault("mismatched", second), by_hand(_FirstSize), microbatches=2, models=("gpt",), ragged=True
    ),
}
CONTROLS: Mapping[str, Entry] = {
    "by-hand": _control(by_hand(ByHand), *Transport, microbatches=2),
    "two-buffers-in-turn": _control(by_hand(_TwoBuffers, waits_first=True), microbatches=3),
    "copy-divided": _control(by_hand(_Divided, copies=True), microbatches=2),
    "freed-in-time": _control(by_hand(_Freed, waits_first=True), microbatches=2),
    "polled-and-waited-for": _control(by_hand(_Polled, waits=True)),
    "batch-waited-for-as-one": _control(by_hand(_LastOfBatch), Transport.PAIR),
    "whole-batch-waited-for": _control(by_hand(_LastOfBatch, waited=slice(None))),
}
