"""Messages that meet in a wrong order, or wait for each other, on ordered transports."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.own.faults import Plant
from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.step import Parts
from pipeproof.pipeline.transport import Message, Transport
from pipeproof.wings.specimens.families.by_hand import (
    RECEIVED,
    SENT,
    ByHand,
    by_hand,
    plant_beside,
    scale_gradients,
)
from pipeproof.wings.specimens.planting import To
from pipeproof.wings.specimens.specimen import Entry

_APART = 10**6  # far from the schedule's tags
_BOTH_WAYS: tuple[tuple[To, ...], tuple[To, ...]] = (SENT, To(Kind.SEND_B, 1)), (RECEIVED, To(Kind.RECV_B, 0))


def _newest_first(own: ByHand, message: Message, nbytes: int) -> None:
    """Post the receives of two messages, the second one's first, and trust in tags."""
    action = message.name
    if isinstance(action, Action) and action.microbatch == 0:
        later = message._replace(name=action._replace(microbatch=1), tag=message.tag + 3 * 2)
        ByHand.posts(own, later, nbytes)
        ByHand.posts(own, message, nbytes)


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


PLANTS: Mapping[str, Plant | Entry] = {
    "matched-by-order": by_hand(posts=_newest_first),
    "two-streams-of-messages": by_hand(_WithNotes),
    "received-ahead-of-its-cause": by_hand(_Ahead),
    "sends-wait-at-once": by_hand(_Blocking),
    "received-after-the-barrier": by_hand(_AndBarrier),
    "both-send-first": plant_beside(_exchange),
    "any-source-by-rank": plant_beside(_factors, by_sender=False),
    "newest-first-by-tag": by_hand(posts=_newest_first),
    "notes-first": by_hand(_WithNotes, note_first=True),
    "received-ahead-by-tag": by_hand(_Ahead),
    "received-behind-its-cause": by_hand(_Ahead, ahead=False),
    "sends-wait-in-gpipe": by_hand(_Blocking),
    "received-before-the-barrier": by_hand(_AndBarrier, barrier_last=True),
    "exchanged-in-turn": plant_beside(_exchange, first=0),
    "exchanged-in-a-batch": plant_beside(_exchange_in_a_batch),
    "any-source-by-sender": plant_beside(_factors, by_sender=True),
}
