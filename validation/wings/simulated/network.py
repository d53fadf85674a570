"""The simulated network: which ends of messages meet, and when they may, by the rules of a transport."""

from collections import defaultdict, deque
from functools import partial

from torch import Tensor

from pipeproof.core.observe.stack import own_stack
from pipeproof.pipeline.transports import Queue, Rules
from pipeproof.wings.simulated.buffers import HeldTensors, copies, describe, fit, race
from pipeproof.wings.simulated.engine.scheduler import Scheduler, Wait
from pipeproof.wings.simulated.message_endpoints import Batch, End, Ends, Room, Way
from pipeproof.wings.simulated.store import Communicator
from pipeproof.wings.simulated.torch_inside import unwatch
from pipeproof.wings.simulated.work import SimulatedWork, Works


class Network:
    """Carries messages between the ranks of a run, each at a moment that the scheduler chooses.

    room: bytes buffered between two ranks, for transports that keep messages in order.
    """

    def __init__(self, scheduler: Scheduler, rules: Rules, *, latency_s: float = 0.0, room: int = 0) -> None:
        self.scheduler = scheduler
        self.rules = rules
        self.works = Works(scheduler)
        self._room = Room(room)
        self.latency_s = latency_s
        self._batches: dict[int, Batch] = {}
        self._ends: defaultdict[Way, Ends] = defaultdict(Ends)
        self._from_any: defaultdict[Way, deque[End]] = defaultdict(deque)
        self._ended_s: defaultdict[Way, float] = defaultdict(float)  # time of the last finished end, by queue
        self._queues: defaultdict[Way, deque[list[End]]] = defaultdict(deque)
        self._unkept: defaultdict[Way, deque[End]] = defaultdict(deque)  # sends still here
        self._unreceived: defaultdict[Way, deque[End]] = defaultdict(deque)  # with room: unreceived sends

    def batch(self, count: int) -> None:
        """Announce a batch: the running rank's next ``count`` messages come from one call."""
        self._batches[self.scheduler.running] = Batch(count)

    @unwatch
    def send(self, communicator: Communicator, rank: int, peer: int, tag: int, tensors: list[Tensor]) -> SimulatedWork:
        """Post a send by the running rank."""
        stack, given = own_stack(), [] if self.rules.buffered else tensors
        self.works.uses(tensors, stack)
        wait, on_stream = _waiting("a send to", communicator, peer), self.on_stream(communicator)
        work = self.works.add(
            SimulatedWork(self.scheduler, wait, stack, given, (), posted_as="sent", on_stream=on_stream)
        )
        held = HeldTensors(copies(tensors)) if self.rules.buffered else work.given
        self._post(End(communicator, rank, peer, tag, True, held, work, self._current()))
        return work

    @unwatch
    def receive(
        self, communicator: Communicator, rank: int, peer: int | None, tag: int, tensors: list[Tensor]
    ) -> SimulatedWork:
        """Post a receive by the running rank."""
        stack = own_stack()
        self.works.claims(tensors, stack)
        wait, on_stream = _waiting("a message from", communicator, peer), self.on_stream(communicator)
        work = self.works.add(
            SimulatedWork(self.scheduler, wait, stack, (), tensors, posted_as="received", on_stream=on_stream)
        )
        self._post(End(communicator, rank, peer, tag, False, work.awaited, work, self._current()))
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

    def _current(self) -> Batch:
        return self._batches.get(self.scheduler.running) or Batch(1)

    def _post(self, end: End) -> None:
        batch, rank = end.batch, self.scheduler.running
        batch.left -= 1
        batch.works.append(end.work)
        if self.rules.one_stream:
            end.work.together = batch.works
        if not batch.left:
            self._batches.pop(rank, None)
        if self.rules.buffered and end.sends:
            end.work.end()
        self._enqueue(end)
        if end.sends and self._room:
            self._unreceived[self._way(end)].append(end)
        self._match(end)
        if end.sends and not self.rules.by_name:
            self._unkept[self._way(end)].append(end)
            self._keep(self._way(end))
        self.scheduler.pause()
        if self.rules.blocking and not batch.left:
            for work in batch.works:
                work.hold()

    def _enqueue(self, end: End) -> None:
        if (way := self._queue(end)) is None:
            return
        queue = self._queues[way]
        if queue and queue[-1][-1].batch is end.batch:
            queue[-1].append(end)
        else:
            queue.append([end])
        if len(queue) == 1:
            end.batch.freed_s.setdefault(way, self._ended_s[way])
        end.freed_s = end.batch.freed_s.get(way, 0.0)

    def _queue(self, end: End) -> Way | None:
        if self.rules.queue is Queue.NONE:
            return None
        return (end.communicator.number, end.rank, *(end.peer, end.sends)[: self.rules.queue - 1])

    def _match(self, end: End) -> None:
        """Match this end with a posted one."""
        if end.peer is None:
            self._from_any[end.communicator.number, end.rank, end.tag].append(end)
            self._offer_to_any(end)
            return
        ends = self._ends[self._way(end)]
        theirs, own = (ends.receives, ends.sends) if end.sends else (ends.sends, ends.receives)
        if theirs:
            end.other = theirs.popleft()
            end.other.other = end
            self._offer(end)
        else:
            own.append(end)
        self._offer_to_any(end)

    def _offer_to_any(self, end: End) -> None:
        """Offer a receive from any rank to each sender's first message."""
        receiver = end.peer if end.sends else end.rank
        inbox = (end.communicator.number, receiver, end.tag)
        if inbox not in self._from_any:
            return
        self.scheduler.touch(("inbox", inbox), changes=not end.sends and end.peer is not None)
        for ends in self._to(inbox):
            for send in ends.sends:
                self.scheduler.withdraw(send.work.name)
            if self._from_any[inbox]:
                first = ends.sends[0]
                self.scheduler.offer(first.work.name, unwatch(partial(self._arrive, inbox, ends, first)))

    def _to(self, inbox: Way) -> list[Ends]:
        """Return each sender's ends for an inbox."""
        return [ends for (one, _, *way), ends in self._ends.items() if (one, *way) == inbox and ends.sends]

    def _arrive(self, inbox: Way, ends: Ends, send: End) -> None:
        receive = self._from_any[inbox].popleft()
        self.scheduler.touch(("inbox", inbox), changes=True)
        for others in self._to(inbox):
            self.scheduler.history.rival(others.sends[0].work.name)
        ends.sends.popleft()
        self._carry(send, receive)
        self._offer_to_any(send)

    def _way(self, end: End) -> Way:
        sender, receiver = (end.rank, end.peer) if end.sends else (end.peer, end.rank)
        return (end.communicator.number, sender, receiver, *((end.tag,) if self.rules.by_name else ()))

    def _offer(self, end: End) -> None:
        """Offer a message once both ends are first in their queues."""
        other = end.other
        if other is None or end.offered or other.offered or not (self._next(end) and self._next(other)):
            return
        send, receive = (end, other) if end.sends else (other, end)
        if self._room and self._unreceived[self._way(send)][0] is not send:
            return
        end.offered = other.offered = True
        named = receive if send.kept else send  # a buffered message has moved once
        self.scheduler.offer(named.work.name, unwatch(partial(self._carry, send, receive)))

    def _next(self, end: End) -> bool:
        way = self._queue(end)
        return end.kept or way is None or end in self._queues[way][0]

    def _keep(self, channel: Way) -> None:
        """Buffer a channel's first remaining send, if its turn has come and room is left."""
        end = next(iter(self._unkept[channel]), None)
        if end is None or end.offered or not self._next(end) or not self._room.has(channel, end.size_bytes):
            return
        end.offered = True
        self.scheduler.offer(end.work.name, unwatch(partial(self._keep_message, end)))

    def _keep_message(self, send: End) -> None:
        self.reads(send.work)
        self.scheduler.history.note_need(send.freed)
        contents = copies(send.held.contents)
        self._end_by_room(send)
        send.held, send.kept, send.offered = HeldTensors(contents), True, False
        self._has_left(send)
        self._dequeue(send, send.work.done_s)
        self._offer(send)

    def _end_by_room(self, send: End) -> None:
        """End a buffered send at its buffering time, even if the run meets its receive first."""
        send.place = self._room.take(self._way(send), send.size_bytes)
        if self._room.holds(send.size_bytes):
            send.work.end(at_s=max(send.work.posted_s, send.freed_s, send.place.free_s))

    def _has_left(self, send: End) -> None:
        """Mark a send as buffered or received: the channel's next may be buffered."""
        if send in self._unkept[channel := self._way(send)]:
            self._unkept[channel].remove(send)
            self._keep(channel)

    def _carry(self, send: End, receive: End) -> None:
        if not send.kept:
            self.reads(send.work)
        for event in (receive.work.posted, send.work.moved, send.freed, receive.freed):
            self.scheduler.history.note_need(event)
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
        if send.place is not None:
            send.place.left_s = at_s
        for end in (send, receive):
            if not end.kept:
                self._dequeue(end, end.work.done_s)
        if self._room:
            self._receive(self._way(send))
        if not send.kept:
            self._has_left(send)
            return
        channel = self._way(send)
        for waiting in [*self._unkept[channel]][:1]:
            waiting.freed = self.scheduler.history.now
        self._keep(channel)

    def _receive(self, channel: Way) -> None:
        """Finish a channel's first message, and turn to the next."""
        self._unreceived[channel].popleft()
        if self._unreceived[channel]:
            self._offer(self._unreceived[channel][0])

    def _dequeue(self, end: End, at_s: float) -> None:
        if (way := self._queue(end)) is None:
            return
        queue = self._queues[way]
        queue[0].remove(end)
        self._ended_s[way] = max(self._ended_s[way], at_s)
        if not queue[0]:
            queue.popleft()
            for following in queue[0] if queue else ():
                following.freed = self.scheduler.history.now
                following.freed_s = following.batch.freed_s.setdefault(way, self._ended_s[way])
                self._offer(following)
                if following.sends:
                    self._keep(self._way(following))


class _waiting:
    """Describes the wait for a message on demand, because the other rank may join the group meanwhile."""

    def __init__(self, what: str, communicator: Communicator, peer: int | None) -> None:
        self._what, self._communicator, self._peer = what, communicator, peer

    def __call__(self) -> Wait:
        if self._peer is None:
            others = self._communicator.members.values()
            return Wait(f"{self._what} any rank", tuple(sorted(others)))
        rank = self._communicator.global_rank(self._peer)
        if rank is None:
            return Wait(f"{self._what} rank {self._peer} of a group that it has not come to")
        return Wait(f"{self._what} rank {rank}", (rank,))
