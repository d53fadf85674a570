"""Races of sends: buffers that are written or freed while they are on their way, and works let go."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.cases.specimens.by_hand import ByHand, across, by_hand, raced
from pipeproof.cases.specimens.planting import first
from pipeproof.cases.specimens.specimen import Planted, Specimen
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
}
