"""Races and deadlocks of messages between stages: right on most days, and told by name where ranks are simulated."""

from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.cases.specimens.by_hand import ByHand, by_hand
from pipeproof.cases.specimens.planting import first, second
from pipeproof.cases.specimens.specimen import Fault, Needs, Planted, Specimen, StageAt
from pipeproof.pipeline.transport import Message
from pipeproof.pipeline.transports import Transport

_GLOO, _NCCL = Transport.UNLIMITED, Transport.PAIR
_BOTH = (_GLOO, _NCCL)


def _needs(*transports: Transport, microbatches: int = 2) -> Needs:
    return Needs(ranks=2, microbatches=microbatches, models=("mlp",), transports=transports or _BOTH)


def _fault(kind: str, stage: StageAt) -> Fault:
    """What the simulated world calls it, and on whose rank it is."""
    return Fault(kind, kind, stage=stage)


class _OneBuffer(ByHand):
    """Copies what it sends into one buffer, and does not wait before it does so again."""

    out: Tensor | None = None

    def sends(self, message: Message, buffer: Tensor) -> None:
        self.out = torch.empty_like(buffer) if self.out is None else self.out
        self.out.copy_(buffer)
        super().sends(message, self.out)


class _ReadEarly(ByHand):
    """Hands on what it receives, and waits when the step ends."""

    def takes(self, message: Message) -> Tensor:
        work, buffer = self.posted.pop(message)
        self.sending.append((work, buffer))
        return buffer


class _SendLetGo(ByHand):
    """Lets go of the work of its sends."""

    def sends(self, message: Message, buffer: Tensor) -> None:
        dist.isend(buffer, message.peer, tag=message.tag)


class _ReceivedTwice(ByHand):
    """Has one buffer to receive into, and posts the next receive before the last has come."""

    into: Tensor | None = None

    def posts(self, message: Message, nbytes: int) -> None:
        self.into = torch.empty(nbytes, dtype=torch.uint8) if self.into is None else self.into
        self.posted[message] = dist.irecv(self.into, message.peer, tag=message.tag), self.into


class _AsDoubles(ByHand):
    """Receives numbers of another type: as many bytes, so that a transport that counts bytes is content."""

    def posts(self, message: Message, nbytes: int) -> None:
        buffer = torch.empty(nbytes // 8, dtype=torch.float64)
        work = dist.irecv(buffer, message.peer, tag=message.tag)
        self.posted[message] = work, buffer.view(torch.uint8)


_planted = partial(Specimen, classes=("tI", "mE"), schedule="gpipe")

SPECIMENS: Mapping[str, Specimen] = {
    "send-buffer-reused": _planted(
        summary="one buffer takes every activation that is sent, also while the last one is on its way",
        origin="NVIDIA/Megatron-LM#4047; pytorch/PiPPy#1055",
        fault=_fault("overwritten-in-flight", first),
        needs=_needs(),
        plant=by_hand(_OneBuffer),
    ),
    "receive-not-waited-for": _planted(
        summary="an activation is used as soon as its receive is posted; the wait comes when the step ends",
        origin="pytorch/PiPPy#585",
        fault=_fault("read-before-wait", second),
        needs=_needs(microbatches=1),
        plant=by_hand(_ReadEarly),
    ),
    "send-let-go": _planted(
        summary="nobody keeps the work of a send, or waits for it",
        origin="pytorch/PiPPy#1053, #1055",
        fault=_fault("never-waited", first),
        needs=_needs(_GLOO, microbatches=1),
        plant=by_hand(_SendLetGo),
    ),
    "receives-into-one-buffer": _planted(
        summary="two receives are posted into one buffer",
        origin="no report: the class of NVIDIA/Megatron-LM#4433, buffers that are used again too early",
        fault=_fault("received-twice", second),
        needs=Needs(ranks=2, microbatches=2, models=("mlp",), plan=("train", "train"), transports=(_GLOO,)),
        plant=by_hand(_ReceivedTwice),
    ),
    "received-as-doubles": _planted(
        summary="an activation is received as another type of as many bytes",
        origin="pytorch/pytorch#165143",
        classes=("tI", "mF"),
        fault=_fault("mismatched", second),
        needs=_needs(microbatches=1),
        plant=by_hand(_AsDoubles),
    ),
}
CONTROLS: Mapping[str, Planted] = {
    "by-hand": Planted(
        summary="activations are posted by hand, each with a buffer of its own, and waited for",
        origin="what pytorch's notes on point-to-point communication ask for",
        needs=_needs(*Transport),
        schedule="gpipe",
        plant=by_hand(ByHand),
    ),
}
