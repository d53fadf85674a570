"""Works, returned by calls into the simulated network and finished by it; and all works of a rank."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from torch import Tensor
from torch._C._distributed_c10d import Work

from pipeproof.core.observe.stack import Stack
from pipeproof.wings.simulated.buffers import NOTHING_HELD, HeldTensors, overlap, poison, race
from pipeproof.wings.simulated.engine.scheduler import Scheduler, Wait
from pipeproof.wings.simulated.store import Communicator
from pipeproof.wings.simulated.torch_inside import places_of, unwatch
from pipeproof.worlds.rank_report import Race

if TYPE_CHECKING:
    from torch.futures import Future

_NO_TIMEOUT = timedelta(0)


class SimulatedWork(Work):
    """A message's end, or a rank's part of a collective, from its call to its wait.

    Meanwhile ``given`` and ``expected`` must stay unwritten and allocated. ``expected`` holds poison, unless also
    given: results are written at the wait, as late as a transport may. ``posted_as``: its call, in a word. ``wrote``:
    lines known to have written or freed its buffers. ``on_stream``: a device waits for it instead of its program,
    unless it ``holds_program``. ``rewritten``: a function wrote to ``expected``, perhaps the same bits, for example by
    adding to NaN.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        wait: Callable[[], Wait],
        stack: Stack,
        given: Sequence[Tensor],
        expected: Sequence[Tensor],
        *,
        posted_as: str,
        on_stream: bool = False,
    ) -> None:
        super().__init__()
        self.rank = scheduler.running
        self.name = scheduler.call()
        self.posted = self.moved = scheduler.history.now
        self.posted_s = self.done_s = scheduler.clock.now_s
        self.stack = stack
        self.posted_as = posted_as
        self.wrote: Stack = ()
        self.expected = expected
        self.source = -1
        self.communicator: Communicator | None = None  # of a collective
        self.together: Sequence[SimulatedWork] = (self,)  # works of one call that end together
        self.over = False  # on the network
        self.met = False  # by its rank
        self.holds_program = self.rewritten = self._rewritten_given = False
        self.error: Race | None = None
        self._scheduler = scheduler
        self._wait = wait
        self._came: Sequence[Tensor] = ()
        self._waiting = False
        self._on_stream = on_stream
        poison(self._empty(given))
        self.given, self.awaited = HeldTensors(given), HeldTensors(expected)
        self.places = frozenset(place for tensor in (*given, *expected) for place in places_of(tensor))
        if given:
            scheduler.history.gives(self.name, self.given)

    @property
    def text(self) -> str:
        """Description of the work for a waiting rank."""
        return self._wait().text

    def end(self, came: Sequence[Tensor] = (), *, at_s: float = 0.0) -> None:
        """Finish it at ``at_s`` on the ranks' clocks: ``came`` fills its buffers.

        Only now can early changes to ``given`` be found: after an answer to a message, the sender may change it even
        before the wait.
        """
        self._look_into(self.given)
        self.given = NOTHING_HELD
        self._came, self.over = came, True
        self.moved, self.done_s = self._scheduler.history.now, max(at_s, self.posted_s)
        self._scheduler.touch(("work", self.name), changes=True)
        if self._waiting:
            self._scheduler.wake(self.rank)

    def hold(self, *, for_device: bool = False) -> None:
        """Continue after its end; this is no wait by the user."""
        if not self.over:
            self._waiting = True
            self._scheduler.block(self._wait, for_device=for_device, by_device=self._on_stream)
            self._waiting = False
        self._scheduler.history.note_need(self.moved)
        self._scheduler.clock.reach(self.done_s)

    @unwatch
    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for its end, with all works that end together.

        Time is simulated, so timeouts never expire: what never comes is a deadlock.
        """
        if self.met:
            return True
        if self.over:
            self._scheduler.pause()
        for_device = self._on_stream and not self.holds_program and timeout == _NO_TIMEOUT
        for work in self.together:
            work.hold(for_device=for_device)
            work._meet()
        return True

    @unwatch
    def is_completed(self) -> bool:
        """True at its end; the caller may then use the buffers."""
        self._scheduler.pause()
        if self._scheduler.ask(("work", self.name), lambda: self.over):
            for work in [one for one in self.together if one.over]:
                work._meet()
        return self.over

    def is_done(self) -> bool:
        """True at its end; this query is no wait."""
        return self.over

    def is_success(self) -> bool:
        """True at its end: works never fail on the way."""
        return self.over

    def synchronize(self) -> None:
        """Wait, see ``wait``."""
        self.wait()

    def _source_rank(self) -> int:
        return self.source

    source_rank = _source_rank

    def result(self) -> list[Tensor]:
        """Return its filled buffers."""
        return list(self.expected)

    def get_future(self) -> "Future[list[Tensor]]":
        """Return a finished future, after waiting: nothing here runs beside the ranks."""
        from torch.futures import Future

        self.wait()
        future: Future[list[Tensor]] = Future()
        future.set_result(list(self.expected))
        return future

    def _meet(self) -> None:
        if not self.met:
            self.met = True
            self._scheduler.clock.reach(self.done_s)
            self._scheduler.history.note_need(self.moved)
            self._scheduler.history.takes_back(self.name)
            self._look_into(self.awaited)
            self.check()
            self.awaited.fill(self._came)
            self._came, self.awaited = (), NOTHING_HELD

    def _empty(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Return the buffers in ``expected`` and not in ``given``."""
        return [one for one in self.expected if not any(overlap(one, other) for other in given)]

    @property
    def disturbed(self) -> bool:
        """True if its buffers were written or freed."""
        return self.rewritten or any(held.freed or held.changed for held in (self.given, self.awaited))

    def note_write(self, stack: Stack) -> None:
        """Note a write or free by its rank just now, which may be undone too late."""
        self.wrote = stack
        self._rewritten_given |= not self.over and self.given.changed

    def _look_into(self, held: HeldTensors) -> None:
        """Record the race caused by its rank, unless one exists."""
        changed = held.changed or (self.rewritten if held is self.awaited else self._rewritten_given)
        if self.error is not None or (not (freed := held.freed) and not changed):
            return
        kind, did, line = (
            ("freed-in-flight", "freed or resized", "freed")
            if freed
            else ("overwritten-in-flight", "wrote into", "written")
        )
        said = f"rank {self.rank} {did} a buffer while {self.text} was on its way"
        self.error = race(kind, self.rank, said, **{line: self.wrote, self.posted_as: self.stack})

    def check(self) -> None:
        """Raise the recorded race."""
        if self.error is not None:
            self._scheduler.tell(self.error)


class Works:
    """Works of all ranks."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._all: defaultdict[int, list[SimulatedWork]] = defaultdict(list)
        self._unmet: defaultdict[int, list[SimulatedWork]] = defaultdict(list)

    def add(self, work: SimulatedWork) -> SimulatedWork:
        """Remember ``work`` until its rank returns, and as pending until its wait."""
        self._all[work.rank].append(work)
        self._unmet[work.rank].append(work)
        return work

    def pop(self, rank: int) -> Sequence[SimulatedWork]:
        """Remove and return a returned rank's works."""
        return self._all.pop(rank, ())

    def unmet(self, rank: int) -> list[SimulatedWork]:
        """Return works without a wait, except sends that have left."""
        unmet = self._unmet[rank]
        if unmet:
            self._unmet[rank] = unmet = [one for one in unmet if not (one.met or (one.over and not one.expected))]
        return unmet

    def pending_in(self, tensors: Sequence[Tensor]) -> SimulatedWork | None:
        """Return the running rank's pending work on this memory."""
        unmet = self.unmet(self._scheduler.running)
        return next(
            (work for work in unmet for one in tensors for expected in work.expected if overlap(one, expected)), None
        )

    def claims(self, tensors: Sequence[Tensor], stack: Stack) -> None:
        """Claim buffers for the current call to fill. Raises the race with transfers in flight."""
        if (work := self.pending_in(tensors)) is not None:
            rank = work.rank
            said = f"rank {rank} posted two receives into one buffer"
            if work.posted_as != "received":
                said = f"rank {rank} wanted two things in one buffer, of which one was {work.text}"
            self._scheduler.tell(race("received-twice", rank, said, first_posted=work.stack, second_posted=stack))

    def uses(self, tensors: Sequence[Tensor], stack: Stack) -> None:
        """Use buffers in the current call. Raises the race with incomplete receives."""
        if (work := self.pending_in(tensors)) is not None:
            self._scheduler.tell(read_early(work, stack))


def read_early(work: SimulatedWork, stack: Stack) -> Race:
    """Return the race for reading a work's receive buffer here."""
    said = f"rank {work.rank} used a buffer before {work.text} had been waited for"
    return race("read-before-wait", work.rank, said, used=stack, **{work.posted_as: work.stack})
