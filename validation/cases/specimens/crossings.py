"""Messages that meet in another order than was meant, or wait for each other, as a transport's own order has it."""

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.cases.specimens.by_hand import (
    RECEIVED,
    SENT,
    ByHand,
    across,
    beside,
    by_hand,
    hung,
    raced,
    scale_gradients,
)
from pipeproof.cases.specimens.planting import To, second
from pipeproof.cases.specimens.specimen import Fault, Needs, Planted, Specimen
from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.step import Parts
from pipeproof.pipeline.transport import Message, Transport
from pipeproof.pipeline.transports import Transport as Transports

_GLOO, _NCCL, _BUFFERED = Transports.UNLIMITED, Transports.PAIR, Transports.BUFFERED
_APART = 10**6  # from tag to tag, so that they are none of the schedule's


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
    """Beside each activation goes a note on it. The receiver wants the note first, and the sender gives it last."""

    note_first = False

    def sends(self, message: Message, buffer: Tensor) -> None:
        note = torch.tensor([len(buffer)])
        both = [(buffer, message.tag), (note, message.tag + _APART)]
        for content, tag in reversed(both) if self.note_first else both:
            self.sending.append((dist.isend(content, message.peer, tag=tag), content))

    def posts(self, message: Message, nbytes: int) -> None:
        note = torch.empty(1, dtype=torch.int64)
        self.sending.append((dist.irecv(note, message.peer, tag=message.tag + _APART), note))
        super().posts(message, nbytes)


class _NotesFirst(_WithNotes):
    """So on both ends."""

    note_first = True


class _Ahead(ByHand):
    """Posts the receive of a gradient ahead of the send of the activation that it answers."""

    sent, received = (SENT, To(Kind.SEND_B, 1)), (RECEIVED, To(Kind.RECV_B, 0))
    ahead = True

    def sends(self, message: Message, buffer: Tensor) -> None:
        action = message.name
        if self.ahead and isinstance(action, Action) and action.kind is Kind.SEND_F:
            answer = message._replace(name=Action(0, Kind.RECV_B, action.microbatch), tag=message.tag + 1)
            super().posts(answer, len(buffer) + 1)  # a byte says whether there is one
        super().sends(message, buffer)

    def posts(self, message: Message, nbytes: int) -> None:
        if message not in self.posted:
            super().posts(message, nbytes)


class _Behind(_Ahead):
    """So behind it."""

    ahead = False


class _Blocking(ByHand):
    """``send`` and ``recv``, each where the schedule has its message."""

    sent: tuple[To, ...] = (SENT, To(Kind.SEND_B, 1))
    received: tuple[To, ...] = (RECEIVED, To(Kind.RECV_B, 0))

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.due: dict[Message, int] = {}

    def sends(self, message: Message, buffer: Tensor) -> None:
        dist.send(buffer, message.peer, tag=message.tag)

    def posts(self, message: Message, nbytes: int) -> None:
        self.due[message] = nbytes

    def takes(self, message: Message) -> Tensor:
        buffer = torch.empty(self.due.pop(message), dtype=torch.uint8)
        dist.recv(buffer, message.peer, tag=message.tag)
        return buffer


class _AfterBarrier(_Blocking):
    """Sends, waits and comes to a barrier. The other rank posts its receive once the barrier is over."""

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


class _BeforeBarrier(_AfterBarrier):
    """So once it has received."""

    barrier_last = True


def _exchanged(parts: Parts) -> None:
    """Both send what they have, and then receive: each waits for the other's receive."""
    rank, found = parts.transport.rank, torch.ones(1)
    dist.send(torch.ones(1), 1 - rank, tag=_APART)
    dist.recv(found, 1 - rank, tag=_APART)


def _exchanged_in_turn(parts: Parts) -> None:
    """So that the even one sends first."""
    rank, found = parts.transport.rank, torch.ones(1)
    for turn in (0, 1):
        if turn == rank:
            dist.send(torch.ones(1), 1 - rank, tag=_APART)
        else:
            dist.recv(found, 1 - rank, tag=_APART)


def _exchanged_in_a_batch(parts: Parts) -> None:
    """So in one batch."""
    other = 1 - parts.transport.rank
    ends = [(dist.isend, torch.ones(1)), (dist.irecv, torch.ones(1))]
    for work in dist.batch_isend_irecv([dist.P2POp(post, end, other, tag=_APART) for post, end in ends]):
        work.wait()


def _factors(hand_out: Callable[[list[tuple[int, Tensor]]], list[Tensor]]) -> Callable[[Parts], None]:
    """Ranks tell the first one a factor, which takes them as they come, and get it back.

    Gradients are divided by the one and multiplied by the other.
    """

    def told(parts: Parts) -> None:
        rank, others = parts.transport.rank, range(1, parts.transport.n_ranks)
        if rank == 0:
            came = [(_taken(factor := torch.empty(1)), factor) for _ in others]
            for one, factor in zip(others, hand_out(came), strict=True):
                dist.send(factor, one, tag=_APART)
            return
        own, answer = torch.tensor([2.0**rank]), torch.empty(1)
        dist.send(own, 0, tag=_APART)
        dist.recv(answer, 0, tag=_APART)
        scale_gradients(parts, (answer / own).item())

    return told


def _taken(into: Tensor) -> int:
    """From whom this came."""
    return dist.recv(into, tag=_APART)


_planted = partial(Specimen, classes=("tI", "mF"), schedule="gpipe")
_control = partial(Planted, origin="the same code in the right order", schedule="gpipe")
_THREE = Needs(ranks=3, models=("mlp",), transports=(_GLOO,))

SPECIMENS: Mapping[str, Specimen] = {
    "matched-by-order": _planted(
        summary="receives are posted in another order than sends, with tags that NCCL does not look at",
        origin="NVIDIA/Megatron-LM#1450",
        fault=Fault("wrong-message", "loss", stage=second, microbatches=(0, 1), alike=("swapped-activations",)),
        needs=across(_NCCL),
        plant=by_hand(_NewestFirst),
    ),
    "two-streams-of-messages": _planted(
        summary="activations and notes on them share a communicator, and two ranks post them in another order",
        origin="no report: the class of NVIDIA/Megatron-LM#1450, messages without tags",
        fault=raced("mismatched", second),
        needs=across(_NCCL, microbatches=1),
        plant=by_hand(_WithNotes),
    ),
    "received-ahead-of-its-cause": _planted(
        summary="the receive of a gradient is posted ahead of the send that it answers, in one queue",
        origin="sail-sg/zero-bubble-pipeline-parallelism 6758ebea",
        fault=hung(),
        needs=across(_NCCL, microbatches=1),
        plant=by_hand(_Ahead),
    ),
    "sends-wait-at-once": _planted(
        summary="1F1B with `send` and `recv`: an activation and a gradient cross, and neither is received first",
        origin="pytorch/pytorch#126419",
        schedule="1f1b",
        fault=hung(),
        needs=across(),
        plant=by_hand(_Blocking),
    ),
    "received-after-the-barrier": _planted(
        summary="a receive is posted behind a barrier, to which the other rank comes once its send is done",
        origin="no report: the class of receives that are posted too late",
        fault=hung(),
        needs=across(_GLOO, _NCCL, microbatches=1),
        plant=by_hand(_AfterBarrier),
    ),
    "both-send-first": _planted(
        summary="two ranks exchange a tensor: both send, and then receive",
        origin="no report: the class of exchanges that buffers alone let pass",
        fault=hung(),
        needs=across(_GLOO, _NCCL, microbatches=1),
        plant=beside(_exchanged),
    ),
    "any-source-by-rank": _planted(
        summary="what is received from any rank is taken to come in the order of ranks",
        origin="no report: the class of receives from any rank",
        fault=Fault("scale", "gradient"),
        needs=_THREE,
        plant=beside(_factors(lambda came: [factor for _, factor in came])),
    ),
}
CONTROLS: Mapping[str, Planted] = {
    "newest-first-by-tag": _control(
        summary="receives are posted in another order than sends, where tags count",
        needs=across(_GLOO, _BUFFERED),
        plant=by_hand(_NewestFirst),
    ),
    "notes-first": _control(
        summary="activations and notes on them go in one order", needs=across(), plant=by_hand(_NotesFirst)
    ),
    "received-ahead-by-tag": _control(
        summary="the receive of a gradient is posted ahead of its cause, where that is in no queue",
        needs=across(_GLOO, _BUFFERED, Transports.DIRECTED, microbatches=1),
        plant=by_hand(_Ahead),
    ),
    "received-behind-its-cause": _control(
        summary="the receive of a gradient is posted behind the send that it answers",
        needs=across(microbatches=1),
        plant=by_hand(_Behind),
    ),
    "sends-wait-in-gpipe": _control(
        summary="GPipe with `send` and `recv`, where nothing crosses",
        needs=across(),
        plant=by_hand(_Blocking),
    ),
    "received-before-the-barrier": _control(
        summary="both come to the barrier with nothing on its way",
        needs=across(microbatches=1),
        plant=by_hand(_BeforeBarrier),
    ),
    "exchanged-in-turn": _control(
        summary="two ranks exchange a tensor, one after the other",
        needs=across(microbatches=1),
        plant=beside(_exchanged_in_turn),
    ),
    "exchanged-in-a-batch": _control(
        summary="two ranks exchange a tensor in one batch",
        needs=across(microbatches=1),
        plant=beside(_exchanged_in_a_batch),
    ),
    "any-source-by-sender": _control(
        summary="what is received from any rank is told by its sender",
        needs=_THREE,
        plant=beside(_factors(lambda came: [factor for _, factor in sorted(came, key=lambda one: one[0])])),
    ),
}
