"""Races of messages: buffers that are written, freed or read while they are on their way, and works let go."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.cases.specimens.by_hand import BOTH, ByHand, across, by_hand, raced
from pipeproof.cases.specimens.planting import first, second
from pipeproof.cases.specimens.specimen import Needs, Planted, Specimen
from pipeproof.pipeline.transport import Message
from pipeproof.pipeline.transports import Transport

_GLOO = Transport.UNLIMITED


class _OneBuffer(ByHand):
    """Copies what it sends into one buffer, and does not wait before it does so again."""

    out: Tensor | None = None

    def sends(self, message: Message, buffer: Tensor) -> None:
        self.out = torch.empty_like(buffer) if self.out is None else self.out
        self.out.copy_(buffer)
        super().sends(message, self.out)


class _TwoBuffers(ByHand):
    """Two buffers take turns. Each is waited for, but not before the next message is in it."""

    waits_first = False

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.turns: list[tuple[Any, Tensor]] = []

    def sends(self, message: Message, buffer: Tensor) -> None:
        work, out = self.turns.pop(0) if len(self.turns) == 2 else (None, torch.empty_like(buffer))
        if self.waits_first and work is not None:
            work.wait()
        out.copy_(buffer)
        if not self.waits_first and work is not None:
            work.wait()
        self.turns.append((dist.isend(out, message.peer, tag=message.tag), out))

    def ends(self) -> None:
        self.sending += self.turns
        self.turns.clear()
        super().ends()


class _WaitsInTurn(_TwoBuffers):
    """As it is done."""

    waits_first = True


class _Divided(ByHand):
    """Divides what it has sent by the number of microbatches, in place, for its own use."""

    def sends(self, message: Message, buffer: Tensor) -> None:
        super().sends(message, buffer)
        buffer.view(torch.float32).div_(2)


class _DividedCopy(ByHand):
    """So with a copy."""

    def sends(self, message: Message, buffer: Tensor) -> None:
        super().sends(message, buffer)
        buffer.view(torch.float32).clone().div_(2)


class _Freed(ByHand):
    """Frees an output once it is sent, for the graph alone is needed; a tensor of one element takes its place."""

    waits_first = False

    def sends(self, message: Message, buffer: Tensor) -> None:
        out = buffer.clone()
        work = dist.isend(out, message.peer, tag=message.tag)
        if self.waits_first and work is not None:
            work.wait()
        out.data = torch.empty(1, dtype=out.dtype)
        self.sending.append((work, out))


class _FreedInTime(_Freed):
    """So once it has left."""

    waits_first = True


class _NoCopy(ByHand):
    """Takes ``contiguous()`` for a copy; of rows of one element it is none."""

    rows = 1

    def sends(self, message: Message, buffer: Tensor) -> None:
        turned = buffer.view(-1, self.rows).t().contiguous().t()
        super().sends(message, turned.reshape(-1))
        buffer.zero_()


class _Bucket(ByHand):
    """Messages lie in one bucket. Views of it are sent, and it is cleared for the next ones."""

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
    """Lets go of the work of its sends."""

    def sends(self, message: Message, buffer: Tensor) -> None:
        dist.isend(buffer, message.peer, tag=message.tag)


class _OneHandle(ByHand):
    """Keeps one work to a peer: that of the last send."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.work: dict[int, Any] = {}

    def sends(self, message: Message, buffer: Tensor) -> None:
        self.work[message.peer] = dist.isend(buffer, message.peer, tag=message.tag)

    def ends(self) -> None:
        for work in self.work.values():
            work.wait()


class _ReadEarly(ByHand):
    """Hands on what it receives, and waits when the step ends."""

    def takes(self, message: Message) -> Tensor:
        work, buffer = self.posted.pop(message)
        self.sending.append((work, buffer))
        return buffer


class _Polled(ByHand):
    """Asks once whether a message has come, and goes on."""

    again = False

    def takes(self, message: Message) -> Tensor:
        work, buffer = self.posted.pop(message)
        if not work.is_completed() and self.again:
            work.wait()
        return buffer


class _PolledAndWaited(_Polled):
    """So, and waits where it has not."""

    again = True


class _LastOfBatch(ByHand):
    """A message comes in two halves, in one batch of receives; the last work alone is waited for."""

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


class _WholeBatch(_LastOfBatch):
    """All of them are."""

    waited = slice(None)


class _OneBehind(ByHand):
    """Keeps works in a list, and waits for that of the message before."""

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
    """Has one buffer to receive into, and posts the next receive before the last has come."""

    into: Tensor | None = None

    def posts(self, message: Message, nbytes: int) -> None:
        self.into = torch.empty(nbytes, dtype=torch.uint8) if self.into is None else self.into
        self.posted[message] = dist.irecv(self.into, message.peer, tag=message.tag), self.into


class _ClearedLate(ByHand):
    """Clears a buffer once its receive is posted: what had come by then is gone."""

    def posts(self, message: Message, nbytes: int) -> None:
        super().posts(message, nbytes)
        self.posted[message][1].zero_()


class _Pool(ByHand):
    """Gives back the memory of buffers that nobody uses: one is in use from when it is first read."""

    def posts(self, message: Message, nbytes: int) -> None:
        super().posts(message, nbytes)
        for _, buffer in self.posted.values():
            buffer.untyped_storage().resize_(0)


class _AsDoubles(ByHand):
    """Receives numbers of another type: as many bytes, so that a transport that counts bytes is content."""

    def posts(self, message: Message, nbytes: int) -> None:
        buffer = torch.empty(nbytes // 8, dtype=torch.float64)
        work = dist.irecv(buffer, message.peer, tag=message.tag)
        self.posted[message] = work, buffer.view(torch.uint8)


class _FirstSize(ByHand):
    """Takes every message to be as large as the first one."""

    size: int | None = None

    def posts(self, message: Message, nbytes: int) -> None:
        self.size = nbytes if self.size is None else self.size
        super().posts(message, self.size)


_planted = partial(Specimen, classes=("tI", "mE"), schedule="gpipe")
_control = partial(Planted, origin="the same code without the race", schedule="gpipe")

SPECIMENS: Mapping[str, Specimen] = {
    "send-buffer-reused": _planted(
        summary="one buffer takes every activation that is sent, also while the last one is on its way",
        origin="pytorch/PiPPy#1055",
        fault=raced("overwritten-in-flight", first),
        needs=across(),
        plant=by_hand(_OneBuffer),
    ),
    "send-waited-for-late": _planted(
        summary="two send buffers take turns; a send is waited for after the next message is in its buffer",
        origin="no report: the class of pytorch/PiPPy#1055, with the wait in the wrong place",
        fault=raced("overwritten-in-flight", first),
        needs=across(microbatches=3),
        plant=by_hand(_TwoBuffers),
    ),
    "sent-and-divided": _planted(
        summary="an activation is divided in place behind its isend",
        origin="no report: the class of in-place operations on what is being sent",
        fault=raced("overwritten-in-flight", first),
        needs=across(microbatches=1),
        plant=by_hand(_Divided),
    ),
    "sent-and-freed": _planted(
        summary="an output is deallocated while its send is on its way: `out.data = torch.empty(1)`",
        origin="NVIDIA/Megatron-LM#4047",
        fault=raced("freed-in-flight", first),
        needs=across(microbatches=1),
        plant=by_hand(_Freed),
    ),
    "contiguous-is-no-copy": _planted(
        summary="`contiguous()` is taken for a copy, and what it was called on is cleared while that is sent",
        origin="no report: the class of copies that are none for some shapes",
        fault=raced("overwritten-in-flight", first),
        needs=across(microbatches=1),
        plant=by_hand(_NoCopy),
    ),
    "bucket-cleared": _planted(
        summary="views of one bucket are sent, and the bucket is cleared for the next while they are on their way",
        origin="no report: the class of NVIDIA/Megatron-LM#4609, buffers of many tensors",
        fault=raced("overwritten-in-flight", first),
        needs=across(microbatches=3),
        plant=by_hand(_Bucket),
    ),
    "send-let-go": _planted(
        summary="nobody keeps the work of a send, or waits for it",
        origin="pytorch/PiPPy#1053",
        fault=raced("never-waited", first),
        needs=across(_GLOO, microbatches=1),
        plant=by_hand(_SendLetGo),
    ),
    "handle-overwritten": _planted(
        summary="one work is kept to a peer, so that of two sends the last alone is waited for",
        origin="no report: the class of pytorch/PiPPy#1053, works that are lost",
        fault=raced("never-waited", first),
        needs=across(_GLOO),
        plant=by_hand(_OneHandle),
    ),
    "receive-not-waited-for": _planted(
        summary="an activation is used as soon as its receive is posted; the wait comes when the step ends",
        origin="pytorch/PiPPy#585",
        fault=raced("read-before-wait", second),
        needs=across(microbatches=1),
        plant=by_hand(_ReadEarly),
    ),
    "polled-once": _planted(
        summary="a receive is asked once whether it is done, and used whatever the answer was",
        origin="no report: the class of pytorch/PiPPy#585",
        fault=raced("read-before-wait", second),
        needs=across(microbatches=1),
        plant=by_hand(_Polled),
    ),
    "last-of-batch-waited": _planted(
        summary="of a batch of receives the last work alone is waited for",
        origin="pytorch/pytorch#132644",
        fault=raced("read-before-wait", second),
        needs=across(_GLOO, microbatches=1),
        plant=by_hand(_LastOfBatch),
    ),
    "waited-one-behind": _planted(
        summary="the work of the message before is waited for: an index into a list of works is one too small",
        origin="no report: the class of waits for another work than the one that is used",
        fault=raced("read-before-wait", second),
        needs=across(),
        plant=by_hand(_OneBehind),
    ),
    "receives-into-one-buffer": _planted(
        summary="two receives are posted into one buffer",
        origin="no report: the class of NVIDIA/Megatron-LM#4433, buffers that are used again too early",
        fault=raced("received-twice", second),
        needs=Needs(ranks=2, microbatches=2, models=("mlp",), plan=("train", "train"), transports=(_GLOO,)),
        plant=by_hand(_ReceivedTwice),
    ),
    "receive-buffer-cleared": _planted(
        summary="a buffer is cleared after its receive has been posted",
        origin="no report: the class of buffers that are made ready too late",
        fault=raced("overwritten-in-flight", second),
        needs=across(microbatches=1),
        plant=by_hand(_ClearedLate),
    ),
    "pool-takes-back": _planted(
        summary="a pool of receive buffers frees one that a receive is posted into, as nobody has read it",
        origin="no report: the class of pooled receive buffers, as tdrussell/diffusion-pipe#544",
        fault=raced("freed-in-flight", second),
        needs=across(microbatches=1),
        plant=by_hand(_Pool),
    ),
    "received-as-doubles": _planted(
        summary="an activation is received as another type of as many bytes",
        origin="pytorch/pytorch#165143",
        classes=("tI", "mF"),
        fault=raced("mismatched", second),
        needs=across(microbatches=1),
        plant=by_hand(_AsDoubles),
    ),
    "received-at-first-size": _planted(
        summary="every activation is received in the size of the first one, and the microbatches differ",
        origin="deepspeedai/DeepSpeed#5696",
        classes=("tI", "mF"),
        fault=raced("mismatched", second),
        needs=Needs(ranks=2, microbatches=2, models=("gpt",), ragged=True, transports=BOTH),
        plant=by_hand(_FirstSize),
    ),
}
CONTROLS: Mapping[str, Planted] = {
    "by-hand": _control(
        summary="activations are posted by hand, each with a buffer of its own, and waited for",
        needs=across(*Transport),
        plant=by_hand(ByHand),
    ),
    "two-buffers-in-turn": _control(
        summary="two send buffers take turns, and each is waited for before it is used again",
        needs=across(microbatches=3),
        plant=by_hand(_WaitsInTurn),
    ),
    "copy-divided": _control(
        summary="a copy of what is being sent is divided", needs=across(), plant=by_hand(_DividedCopy)
    ),
    "freed-in-time": _control(
        summary="an output is deallocated once its send has been waited for",
        needs=across(),
        plant=by_hand(_FreedInTime),
    ),
    "polled-and-waited-for": _control(
        summary="a receive is asked whether it is done, and waited for where it is not",
        needs=across(microbatches=1),
        plant=by_hand(_PolledAndWaited),
    ),
    "whole-batch-waited-for": _control(
        summary="every work of a batch is waited for", needs=across(microbatches=1), plant=by_hand(_WholeBatch)
    ),
}
