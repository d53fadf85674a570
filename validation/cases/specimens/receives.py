"""Races of receives: buffers that are read, written or freed before they are filled, or filled with something else."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.cases.specimens.by_hand import BOTH, ByHand, across, by_hand, raced
from pipeproof.cases.specimens.planting import second
from pipeproof.cases.specimens.specimen import Needs, Planted, Specimen
from pipeproof.pipeline.transport import Message
from pipeproof.pipeline.transports import Transport

_GLOO = Transport.UNLIMITED


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
    "polled-and-waited-for": _control(
        summary="a receive is asked whether it is done, and waited for where it is not",
        needs=across(microbatches=1),
        plant=by_hand(_PolledAndWaited),
    ),
    "batch-waited-for-as-one": _control(
        summary="of a batch of receives the last work alone is waited for, where NCCL has one for all",
        needs=across(Transport.PAIR, microbatches=1),
        plant=by_hand(_LastOfBatch),
    ),
    "whole-batch-waited-for": _control(
        summary="every work of a batch is waited for", needs=across(microbatches=1), plant=by_hand(_WholeBatch)
    ),
}
