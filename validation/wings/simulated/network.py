"""The simulated network: which ends of messages meet, and when they may, by the rules of a transport."""

from collections import defaultdict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import dropwhile

from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # not in __all__

from pipeproof.core.observe.stack import own_stack
from pipeproof.pipeline.transports import Queue, Rules
from pipeproof.wings.simulated.buffers import HeldTensors, copies, describe, fit, race
from pipeproof.wings.simulated.engine.scheduler import Scheduler, Wait
from pipeproof.wings.simulated.store import MEETING, Communicator
from pipeproof.wings.simulated.torch_inside import unwatch
from pipeproof.wings.simulated.work import SimulatedWork, Works

Way = tuple[Hashable, ...]  # what tells channels apart, or inboxes, or queues


@dataclass(eq=False)
class Channel:
    """Messages that meet in order, and the room in which the network buffers them: a number of bytes.

    A message larger than all is never buffered. Room is returned in the order of taking. So the time when it is free
    depends on the times of earlier messages, and not on the order in which a run visits them. ``inbox``: the channels
    of all senders to a receiver share it, where messages have names.
    """

    inbox: Way
    room: int
    unmatched: "deque[End]" = field(default_factory=deque)  # sends alone, or receives alone
    unkept: "deque[End]" = field(default_factory=deque)  # sends still here
    unreceived: "deque[End]" = field(default_factory=deque)  # with room: unreceived sends
    _inside: "deque[End]" = field(default_factory=deque)  # sends with a part of the room
    _free_s: float = 0.0

    def holds(self, size_bytes: int) -> bool:
        """True if a message of this size fits at all."""
        return 0 < self.room >= size_bytes

    def has_room(self, size_bytes: int) -> bool:
        """True if a message fits now."""
        there = dropwhile(lambda one: one.left_s is not None, self._inside)
        return self.holds(size_bytes) and sum(one.size_bytes for one in there) + size_bytes <= self.room

    def take(self, send: "End") -> float:
        """Take room for the next message, free from this time on; an oversized message waits for it too."""
        self._inside.append(send)
        while len(self._inside) > 1 and sum(one.size_bytes for one in self._inside) > self.room:
            self._free_s = max(self._free_s, self._inside.popleft().left_s or 0.0)
        return self._free_s


@dataclass(eq=False)
class MessageQueue:
    """Batches of ends, one at a time. ``ended_s``: time of the last finished end."""

    batches: "deque[list[End]]" = field(default_factory=deque)
    ended_s: float = 0.0


@dataclass(eq=False)
class Batch:
    """Ends posted together by one call. ``left``: number still to come."""

    left: int
    works: list[SimulatedWork] = field(default_factory=list)
    freed_s: dict[MessageQueue, float] = field(default_factory=dict)  # time when they became next in each queue


@dataclass(eq=False)
class End:
    """One end of a message. ``rank`` and ``peer`` are numbers in its communicator; no peer: from any rank."""

    rank: int
    peer: int | None
    sends: bool
    held: HeldTensors
    work: SimulatedWork
    batch: Batch
    channel: Channel
    queue: MessageQueue | None
    other: "End | None" = None
    offered: bool = False
    kept: bool = False  # a message whose send has ended, by the network
    left_s: float | None = None  # time when it gave its room back
    freed: int = -1  # the event that made it next in its queue
    freed_s: float = 0.0

    @property
    def size_bytes(self) -> int:
        """Size of its tensors."""
        return sum(tensor.nbytes for tensor in self.held.before)

    @property
    def is_next(self) -> bool:
        """True if its turn in its queue has come."""
        return self.kept or self.queue is None or self in self.queue.batches[0]


class Network:
    """Carries messages between the ranks of a run, each at a moment that the scheduler chooses.

    room: bytes buffered between two ranks, for transports that keep messages in order.
    """

    def __init__(self, scheduler: Scheduler, rules: Rules, *, latency_s: float = 0.0, room: int = 0) -> None:
        self.scheduler = scheduler
        self.rules = rules
        self.works = Works(scheduler)
        self.latency_s = latency_s
        self._room = room
        self._communicators: list[Communicator] = []
        self._batches: dict[int, Batch] = {}
        self._channels: dict[Way, Channel] = {}
        self._queues: defaultdict[Way, MessageQueue] = defaultdict(MessageQueue)
        self._from_any: defaultdict[Way, deque[End]] = defaultdict(deque)

    def join(self, store: Store, rank: int, size: int, *, on_host: bool) -> Communicator:
        """Let the running rank join the communicator of ``store``, one for all its ranks, as number ``rank``."""
        number = int(store.compare_set(MEETING, "", str(len(self._communicators))).decode())
        if number == len(self._communicators):
            self._communicators.append(Communicator(number, size, on_host))
        found, world_rank = self._communicators[number], self.scheduler.running
        if size == len(self.scheduler.seats) and rank == world_rank:
            found.members |= {one: one for one in range(size) if one not in found.members}  # also those still to come
        found.members[rank] = world_rank
        found.made[world_rank] = own_stack()
        return found

    def batch(self, count: int) -> None:
        """Announce a batch: the running rank's next ``count`` messages come from one call."""
        self._batches[self.scheduler.running] = Batch(count)

    @unwatch
    def post(
        self, communicator: Communicator, rank: int, peer: int | None, tag: int, tensors: list[Tensor], *, sends: bool
    ) -> SimulatedWork:
        """Post the running rank's end of a message: a send, or a receive."""
        stack, rules = own_stack(), self.rules
        (self.works.uses if sends else self.works.claims)(tensors, stack)
        given: Sequence[Tensor] = tensors if sends and not rules.buffered else ()
        work = SimulatedWork(
            self.scheduler,
            partial(_describe_wait, communicator, peer, sends),
            stack,
            given,
            () if sends else tensors,
            posted_as="sent" if sends else "received",
            on_stream=self.on_stream(communicator),
        )
        self.works.add(work)
        held = work.awaited
        if sends:
            held = HeldTensors(copies(tensors)) if rules.buffered else work.given
        ends = (rank, peer) if sends else (peer, rank)
        way: Way = (communicator.number, *ends, *((tag,) if rules.by_name else ()))
        channel = self._channels.setdefault(way, Channel((way[0], *way[2:]), self._room))
        scope = (communicator.number, rank, *(peer, sends)[: max(rules.queue - 1, 0)])
        queue = self._queues[scope] if rules.queue is not Queue.NONE else None
        batch = self._batches.get(self.scheduler.running) or Batch(1)
        self._add(End(rank, peer, sends, held, work, batch, channel, queue))
        self.scheduler.pause()
        if rules.blocking and not batch.left:
            for one in batch.works:
                one.hold()
        return work

    def on_stream(self, communicator: Communicator) -> bool:
        """True if devices wait for messages here, instead of their programs."""
        return self.rules.on_stream and not communicator.on_host

    def reads(self, work: SimulatedWork) -> None:
        """Note that the current move uses a posted work's tensors."""
        self.scheduler.history.note_need(work.posted)
        self.scheduler.touch(("buffer", work.name), changes=False)

    def leave(self, rank: int) -> None:
        """End a rank that has returned. Raises races of its works, such as a missing wait.

        A send needs no wait on a transport that buffers it.
        """
        self.scheduler.tell_again()
        for work in self.works.pop(rank):
            work.check()
            if not work.met and (work.expected or not self.rules.keeps_sent):
                said = f"rank {rank} returned and had never waited for {work.text}"
                self.scheduler.tell(race("never-waited", rank, said, posted=work.stack))

    def _add(self, end: End) -> None:
        """Add an end to its batch, queue and channel, where it meets the other one, if that is there."""
        batch, channel = end.batch, end.channel
        batch.left -= 1
        batch.works.append(end.work)
        if self.rules.one_stream:
            end.work.together = batch.works
        if not batch.left:
            self._batches.pop(self.scheduler.running, None)
        if self.rules.buffered and end.sends:
            end.work.end()
        if end.queue is not None:
            batches = end.queue.batches
            if batches and batches[-1][-1].batch is batch:
                batches[-1].append(end)
            else:
                batches.append([end])
            if len(batches) == 1:
                batch.freed_s.setdefault(end.queue, end.queue.ended_s)
            end.freed_s = batch.freed_s.get(end.queue, 0.0)
        if end.sends and self._room:
            channel.unreceived.append(end)
        if end.peer is None:
            self._from_any[channel.inbox].append(end)
        elif channel.unmatched and channel.unmatched[0].sends is not end.sends:
            end.other = channel.unmatched.popleft()
            end.other.other = end
            self._offer(end)
        else:
            channel.unmatched.append(end)
        self._offer_to_any(end)
        if end.sends and not self.rules.by_name:
            channel.unkept.append(end)
            self._keep(channel)

    def _offer_to_any(self, end: End) -> None:
        """Offer a receive from any rank to each sender's first message."""
        inbox = end.channel.inbox
        if inbox not in self._from_any:
            return
        self.scheduler.touch(("inbox", inbox), changes=not end.sends and end.peer is not None)
        for channel in self._sending_to(inbox):
            for send in channel.unmatched:
                self.scheduler.moves.pop(send.work.name, None)
            if self._from_any[inbox]:
                first = channel.unmatched[0]
                self.scheduler.moves[first.work.name] = unwatch(partial(self._arrive, first))

    def _sending_to(self, inbox: Way) -> list[Channel]:
        """Return the channels with sends for an inbox."""
        every = [one for one in self._channels.values() if one.inbox == inbox]
        return [one for one in every if one.unmatched and one.unmatched[0].sends]

    def _arrive(self, send: End) -> None:
        inbox = send.channel.inbox
        receive = self._from_any[inbox].popleft()
        self.scheduler.touch(("inbox", inbox), changes=True)
        for channel in self._sending_to(inbox):
            self.scheduler.history.rival(channel.unmatched[0].work.name)
        send.channel.unmatched.popleft()
        self._carry(send, receive)
        self._offer_to_any(send)

    def _offer(self, end: End) -> None:
        """Offer a message once both ends are first in their queues."""
        other = end.other
        if other is None or end.offered or other.offered or not (end.is_next and other.is_next):
            return
        send, receive = (end, other) if end.sends else (other, end)
        if self._room and send.channel.unreceived[0] is not send:
            return
        end.offered = other.offered = True
        named = receive if send.kept else send  # a buffered message has moved once
        self.scheduler.moves[named.work.name] = unwatch(partial(self._carry, send, receive))

    def _keep(self, channel: Channel) -> None:
        """Buffer a channel's first remaining send, if its turn has come and room is left."""
        end = next(iter(channel.unkept), None)
        if end is None or end.offered or not end.is_next or not channel.has_room(end.size_bytes):
            return
        end.offered = True
        self.scheduler.moves[end.work.name] = unwatch(partial(self._keep_message, end))

    def _keep_message(self, send: End) -> None:
        self.reads(send.work)
        self.scheduler.history.note_need(send.freed)
        contents = copies(send.held.contents)
        self._end_by_room(send)
        send.held, send.kept, send.offered = HeldTensors(contents), True, False
        self._note_departure(send)
        self._dequeue(send)
        self._offer(send)

    def _end_by_room(self, send: End) -> None:
        """End a buffered send at its buffering time, even if the run meets its receive first."""
        free_s = send.channel.take(send)
        if send.channel.holds(send.size_bytes):
            send.work.end(at_s=max(send.work.posted_s, send.freed_s, free_s))

    def _note_departure(self, send: End) -> None:
        """Mark a send as buffered or received: the channel's next may be buffered."""
        if send in send.channel.unkept:
            send.channel.unkept.remove(send)
            self._keep(send.channel)

    def _carry(self, send: End, receive: End) -> None:
        history, channel = self.scheduler.history, send.channel
        if not send.kept:
            self.reads(send.work)
        for event in (receive.work.posted, send.work.moved, send.freed, receive.freed):
            history.note_need(event)
        came, sent, expected = send.held.contents, send.held.before, receive.held.before
        if not fit(sent, expected):
            said = f"rank {send.work.rank} sent {describe(sent)}, "
            said += f"and rank {receive.work.rank} received it as {describe(expected)}"
            found = race("mismatched", receive.work.rank, said, sent=send.work.stack, received=receive.work.stack)
            came, send.work.error, receive.work.error = (), found, found
        receive.work.source = send.rank
        if not send.work.over:
            self._end_by_room(send)
        if send.work.over:  # it was buffered
            at_s = max(send.work.done_s + self.latency_s, receive.work.posted_s, receive.freed_s)
        else:
            at_s = max(send.work.posted_s, receive.work.posted_s, send.freed_s, receive.freed_s) + self.latency_s
            send.work.end(at_s=at_s)
        receive.work.end(came, at_s=at_s)
        send.left_s = at_s
        for end in (send, receive):
            if not end.kept:
                self._dequeue(end)
        if self._room:
            channel.unreceived.popleft()
            if channel.unreceived:
                self._offer(channel.unreceived[0])
        if not send.kept:
            self._note_departure(send)
            return
        if channel.unkept:
            channel.unkept[0].freed = history.now
        self._keep(channel)

    def _dequeue(self, end: End) -> None:
        if (queue := end.queue) is None:
            return
        batches = queue.batches
        batches[0].remove(end)
        queue.ended_s = max(queue.ended_s, end.work.done_s)
        if batches[0]:
            return
        batches.popleft()
        for following in batches[0] if batches else ():
            following.freed = self.scheduler.history.now
            following.freed_s = following.batch.freed_s.setdefault(queue, queue.ended_s)
            self._offer(following)
            if following.sends:
                self._keep(following.channel)


def _describe_wait(communicator: Communicator, peer: int | None, sends: bool) -> Wait:
    """Describe the wait for a message, on demand, because the other rank may join the group meanwhile."""
    what = "a send to" if sends else "a message from"
    if peer is None:
        return Wait(f"{what} any rank", tuple(sorted(communicator.members.values())))
    rank = communicator.members.get(peer)
    if rank is None:
        return Wait(f"{what} rank {peer} of a group that it has not come to")
    return Wait(f"{what} rank {rank}", (rank,))
