"""Messages that meet in a wrong order, or wait for each other, on ordered transports."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.step import Parts
from pipeproof.pipeline.transport import Message, Transport
from pipeproof.pipeline.transports import Transport as Transports
from pipeproof.wings.specimens.families.by_hand import (
    RECEIVED,
    SENT,
    ByHand,
    by_hand,
    control,
    hung,
    plant_beside,
    race_fault,
    row,
    scale_gradients,
)
from pipeproof.wings.specimens.planting import To, second
from pipeproof.wings.specimens.specimen import Entry, Fault, Specimen

_GLOO, _NCCL, _BUFFERED = Transports.UNLIMITED, Transports.PAIR, Transports.BUFFERED
_APART = 10**6  # far from the schedule's tags
_BOTH_WAYS: tuple[tuple[To, ...], tuple[To, ...]] = (SENT, To(Kind.SEND_B, 1)), (RECEIVED, To(Kind.RECV_B, 0))


class _NewestFirst(ByHand):
    """Posts the receives of two messages, the second one's first, and trusts in tags."""

    def posts(self, message: Message, nbytes: int) -> None:
        action = message.name
        if not isinstance(action, Action) or action.microbatch != 0:
            return
        later = message._replace(name=action._replace(microbatch=1), tag=message.tag + 3 * 2)
        super().posts(later, nbytes)
        super().posts(message, nbytes)


class _WithNotes(ByHand):
    """Send a note beside each activation. The receiver expects the note first; the sender sends it last."""

    note_first = False  # on both ends

    def sends(self, message: Message, buffer: Tensor) -> None:
        note = torch.tensor([len(buffer)])
        both = [(buffer, message.tag), (note, message.tag + _APART)]
        for content, tag in reversed(both) if self.note_first else both:
            self.sending.append((dist.isend(content, message.peer, tag=tag), content))

    def posts(self, message: Message, nbytes: int) -> None:
        note = torch.empty(1, dtype=torch.int64)
        self.sending.append((dist.irecv(note, message.peer, tag=message.tag + _APART), note))
        super().posts(message, nbytes)


class _Ahead(ByHand):
    """Post a gradient's receive before, or after, the send of the matching activation."""

    sent, received = _BOTH_WAYS
    ahead = True

    def sends(self, message: Message, buffer: Tensor) -> None:
        action = message.name
        if self.ahead and isinstance(action, Action) and action.kind is Kind.SEND_F:
            answer = message._replace(name=Action(0, Kind.RECV_B, action.microbatch), tag=message.tag + 1)
            super().posts(answer, len(buffer) + 1)  # one byte marks its presence
        super().sends(message, buffer)

    def posts(self, message: Message, nbytes: int) -> None:
        if message not in self.posted:
            super().posts(message, nbytes)


class _Blocking(ByHand):
    """Blocking ``send`` and ``recv``, each at its message in the schedule."""

    sent, received = _BOTH_WAYS

    def __init__(self, inner: Transport, **way: Any) -> None:
        super().__init__(inner, **way)
        self.expected: dict[Message, int] = {}

    def sends(self, message: Message, buffer: Tensor) -> None:
        dist.send(buffer, message.peer, tag=message.tag)

    def posts(self, message: Message, nbytes: int) -> None:
        self.expected[message] = nbytes

    def takes(self, message: Message) -> Tensor:
        buffer = torch.empty(self.expected.pop(message), dtype=torch.uint8)
        dist.recv(buffer, message.peer, tag=message.tag)
        return buffer


class _AndBarrier(_Blocking):
    """Sends, waits and comes to a barrier. The other rank posts its receive once the barrier is over, or before."""

    sent, received = (SENT,), (RECEIVED,)
    barrier_last = False

    def sends(self, message: Message, buffer: Tensor) -> None:
        super().sends(message, buffer)
        dist.barrier()

    def takes(self, message: Message) -> Tensor:
        if not self.barrier_last:
            dist.barrier()
        came = super().takes(message)
        if self.barrier_last:
            dist.barrier()
        return came


def _exchange(parts: Parts, *, first: int | None = None) -> None:
    """Send, then receive, on each rank; ``first``: only this rank in that order, the other reversed."""
    rank, found = parts.transport.rank, torch.ones(1)
    receives_first = first not in (None, rank)
    if receives_first:
        dist.recv(found, 1 - rank, tag=_APART)
    dist.send(torch.ones(1), 1 - rank, tag=_APART)
    if not receives_first:
        dist.recv(found, 1 - rank, tag=_APART)


def _exchange_in_a_batch(parts: Parts) -> None:
    """Exchange in one batch."""
    other = 1 - parts.transport.rank
    ends = [(dist.isend, torch.ones(1)), (dist.irecv, torch.ones(1))]
    for work in dist.batch_isend_irecv([dist.P2POp(post, end, other, tag=_APART) for post, end in ends]):
        work.wait()


def _factors(parts: Parts, *, by_sender: bool) -> None:
    """Send factors to the first rank, which takes them on arrival and answers in their order, or its own.

    Gradients are divided by one and multiplied by the other.
    """
    rank, others = parts.transport.rank, range(1, parts.transport.n_ranks)
    if rank == 0:
        came = [(dist.recv(factor := torch.empty(1), tag=_APART), factor) for _ in others]
        taken = sorted(came, key=lambda one: one[0]) if by_sender else came
        for one, (_, factor) in zip(others, taken, strict=True):
            dist.send(factor, one, tag=_APART)
        return
    own, answer = torch.tensor([2.0**rank]), torch.empty(1)
    dist.send(own, 0, tag=_APART)
    dist.recv(answer, 0, tag=_APART)
    scale_gradients(parts, (answer / own).item())


_row, _control = partial(row, schedule="gpipe"), partial(control, schedule="gpipe")
_CROSSED = Fault("wrong-message", "loss", stage=second, microbatches=(0, 1), alike=("swapped-activations",))

SPECIMENS: Mapping[str, Specimen] = {
    "matched-by-order": _row(_CROSSED, by_hand(_NewestFirst), _NCCL, microbatches=2),
    "two-streams-of-messages": _row(race_fault("mismatched", second), by_hand(_WithNotes), _NCCL),
    "received-ahead-of-its-cause": _row(hung(), by_hand(_Ahead), _NCCL),
    "sends-wait-at-once": row(hung(), by_hand(_Blocking), schedule="1f1b", microbatches=2),
    "received-after-the-barrier": _row(hung(), by_hand(_AndBarrier)),
    "both-send-first": _row(hung(), plant_beside(_exchange)),
    "any-source-by-rank": _row(Fault("scale", "gradient"), plant_beside(_factors, by_sender=False), _GLOO, ranks=3),
}
CONTROLS: Mapping[str, Entry] = {
    "newest-first-by-tag": _control(by_hand(_NewestFirst), _GLOO, _BUFFERED, microbatches=2),
    "notes-first": _control(by_hand(_WithNotes, note_first=True), microbatches=2),
    "received-ahead-by-tag": _control(by_hand(_Ahead), _GLOO, _BUFFERED, Transports.DIRECTED),
    "received-behind-its-cause": _control(by_hand(_Ahead, ahead=False)),
    "sends-wait-in-gpipe": _control(by_hand(_Blocking), microbatches=2),
    "received-before-the-barrier": _control(by_hand(_AndBarrier, barrier_last=True)),
    "exchanged-in-turn": _control(plant_beside(_exchange, first=0)),
    "exchanged-in-a-batch": _control(plant_beside(_exchange_in_a_batch)),
    "any-source-by-sender": _control(plant_beside(_factors, by_sender=True), _GLOO, ranks=3),
}
