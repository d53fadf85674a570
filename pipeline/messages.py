"""A program's messages as arrays: sender, receiver, matching ends, and consumers."""

from dataclasses import dataclass

import numpy as np

from pipeproof.pipeline.action import COMPUTE, RECEIVES, SENDS, WAITS, Kind
from pipeproof.pipeline.columns import Columns, Ints, Mask
from pipeproof.pipeline.dataflow import NEVER, NONE
from pipeproof.pipeline.program import Program


@dataclass(frozen=True, eq=False)
class Messages:
    """Message ends in ``columns`` with known stages and microbatches; all arrays hold entries of ``columns``.

    ``key``: a number shared by a message's ends and its content, NONE for other entries. ``peer``: the rank at the
    other end, or NONE.
    """

    columns: Columns
    key: Ints
    peer: Ints
    sends: Ints
    receives: Ints

    @classmethod
    def of(cls, program: Program) -> "Messages":
        """Build the messages of ``program``. Ends with unknown stages or microbatches are left out."""
        schedule, columns = program.schedule, program.columns
        forward = columns.is_kind(Kind.SEND_F, Kind.RECV_F, Kind.WAIT_SEND_F)
        sender = columns.is_kind(*SENDS, *WAITS)
        # The message is numbered by the stage that makes it: one before the receiver of an output, one after else.
        stage = columns.stage.astype(np.int64)
        other = stage + np.where(forward == sender, 1, -1)
        maker = np.where(sender, stage, other)
        known = (columns.microbatch >= 0) & (columns.microbatch < schedule.microbatches) & ~columns.is_kind(*COMPUTE)
        known &= (stage >= 0) & (stage < schedule.n_stages) & (other >= 0) & (other < schedule.n_stages)
        numbers = (np.where(forward, 0, schedule.n_stages) + maker) * schedule.microbatches + columns.microbatch
        placement = np.array(schedule.placement)
        return cls(
            columns,
            np.where(known, numbers, NONE),
            np.where(known, placement[np.where(known, other, 0)], NONE),
            np.flatnonzero(known & columns.is_kind(*SENDS)),
            np.flatnonzero(known & columns.is_kind(*RECEIVES)),
        )

    def first(self, entries: Ints) -> Ints:
        """For every key, the first entry, or NEVER."""
        found = np.full(int(self.key.max(initial=NONE)) + 1, NEVER)
        found[self.key[entries[::-1]]] = entries[::-1]
        return found

    def match_by_name(self) -> tuple[Ints, Ints]:
        """Match sends with receives of the same message, in send order."""
        receive = self.first(self.receives)[self.key[self.sends]]
        return self.sends[receive >= 0], receive[receive >= 0]

    def match_in_order(self) -> tuple[Ints, Ints]:
        """Match the k-th send of every channel (from rank, to rank) with its k-th receive, like untagged transports."""
        rank, peer = self.columns.rank, self.peer
        sends = self.sends[np.lexsort((self.sends, peer[self.sends], rank[self.sends]))]
        receives = self.receives[np.lexsort((self.receives, rank[self.receives], peer[self.receives]))]
        width = int(max(rank.max(initial=0), peer.max(initial=0))) + 1
        sent = _count(rank[sends].astype(np.int64) * width + peer[sends])
        received = _count(peer[receives].astype(np.int64) * width + rank[receives])
        _, at, where = np.intersect1d(sent, received, assume_unique=True, return_indices=True)
        return sends[at], receives[where]


def _count(channel: Ints) -> Ints:
    """Number sorted channels as (channel, count before) in one integer."""
    _, first, counts = np.unique(channel, return_index=True, return_counts=True)
    return (channel << 32) + np.arange(len(channel)) - np.repeat(first, counts)


def consumers(program: Program, messages: Messages) -> Ints:
    """For every receive, in order, the compute action that uses its message, or NEVER."""
    return _computing(program, messages.columns.is_kind(Kind.RECV_F))[messages.receives]


def producers(program: Program, messages: Messages) -> Ints:
    """For every send, in order, the compute action whose product it carries, or NEVER."""
    return _computing(program, messages.columns.is_kind(Kind.SEND_F))[messages.sends]


def _computing(program: Program, forward: Mask) -> Ints:
    """For every entry, the first forward (if ``forward``) or backward of its own stage and microbatch, or NEVER."""
    columns, width = program.columns, program.schedule.microbatches
    size = program.schedule.n_stages * width
    known = (columns.stage >= 0) & (columns.stage < program.schedule.n_stages)
    known &= (columns.microbatch >= 0) & (columns.microbatch < width)
    own = np.where(known, columns.stage.astype(np.int64) * width + columns.microbatch, 0)
    computing = np.full(2 * size, NEVER)
    forwards = columns.is_kind(Kind.FORWARD)
    computes = np.flatnonzero(known & (forwards | columns.is_kind(Kind.BACKWARD, Kind.BACKWARD_INPUT)))[::-1]
    computing[np.where(forwards[computes], 0, size) + own[computes]] = computes
    return np.where(known, computing[np.where(forward, 0, size) + own], NEVER)
