"""A work, which a call into the simulated network gives back and which is done when that says so; and all of a rank."""

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
from pipeproof.wings.simulated.torch_inside import places_of, unwatched
from pipeproof.worlds.rank_report import Race

if TYPE_CHECKING:
    from torch.futures import Future

_NO_TIMEOUT = timedelta(0)


class SimulatedWork(Work):
    """A message's end or a rank's part of a collective, from its call to the moment when it has been waited for.

    Neither ``given`` nor ``due`` may be written meanwhile, or freed. ``due`` hold poison, where they are not given too:
    what has come is written into them when they are waited for, as late as any transport may. ``posted_as``: what its
    call did, in a word. ``wrote``: the lines that are known to have written or freed what it holds. ``on_stream``: a
    device comes to it, and waits for it in its program's place, but where it ``holds_program``. ``rewritten``: a
    function has written into what is due, if only the same bits, as a number added to what is no number leaves them.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        wait: Callable[[], Wait],
        stack: Stack,
        given: Sequence[Tensor],
        due: Sequence[Tensor],
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
        self.due = due
        self.source = -1
        self.communicator: Communicator | None = None  # of a collective
        self.together: Sequence[SimulatedWork] = (self,)  # all that one call has posted, where they end as one
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
        self.given, self.awaited = HeldTensors(given), HeldTensors(due)
        self.places = frozenset(place for tensor in (*given, *due) for place in places_of(tensor))
        if given:
            scheduler.history.gives(self.name, self.given)

    @property
    def text(self) -> str:
        """What it is, as one waits for it."""
        return self._wait().text

    def end(self, came: Sequence[Tensor] = (), *, at_s: float = 0.0) -> None:
        """It is done, at ``at_s`` of the ranks' clocks: ``came`` is for its buffers.

        Only now is it known whether what was given has changed too early: who has an answer to a message may change
        what it sent, also before it waits for that.
        """
        self._look_into(self.given)
        self.given = NOTHING_HELD
        self._came, self.over = came, True
        self.moved, self.done_s = self._scheduler.history.now, max(at_s, self.posted_s)
        self._scheduler.touch(("work", self.name), changes=True)
        if self._waiting:
            self._scheduler.wake(self.rank)

    def hold(self, *, for_device: bool = False) -> None:
        """Go on only once it is done: that is no wait of the user's."""
        if not self.over:
            self._waiting = True
            self._scheduler.block(self._wait, for_device=for_device, by_device=self._on_stream)
            self._waiting = False
        self._scheduler.history.needed(self.moved)
        self._scheduler.clock.reach(self.done_s)

    @unwatched
    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Until it is done, with all that ends as one with it.

        Time is not real, so nothing ever times out: what never comes is a deadlock.
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

    @unwatched
    def is_completed(self) -> bool:
        """Whether it is done; who is told so may use the buffers."""
        self._scheduler.pause()
        if self._scheduler.ask(("work", self.name), lambda: self.over):
            for work in [one for one in self.together if one.over]:
                work._meet()
        return self.over

    def ended(self) -> bool:
        """Whether it is done, for who only looks: that is no wait."""
        return self.over

    def is_success(self) -> bool:
        """Whether it is done: nothing fails on the way."""
        return self.over

    def synchronize(self) -> None:
        """As ``wait``."""
        self.wait()

    def _source_rank(self) -> int:
        return self.source

    source_rank = _source_rank

    def result(self) -> list[Tensor]:
        """The buffers that it filled."""
        return list(self.due)

    def get_future(self) -> "Future[list[Tensor]]":
        """One that is done: it waits first, as nothing here runs beside the ranks."""
        from torch.futures import Future

        self.wait()
        future: Future[list[Tensor]] = Future()
        future.set_result(list(self.due))
        return future

    def _meet(self) -> None:
        if not self.met:
            self.met = True
            self._scheduler.clock.reach(self.done_s)
            self._scheduler.history.needed(self.moved)
            self._scheduler.history.takes_back(self.name)
            self._look_into(self.awaited)
            self.check()
            self.awaited.fill(self._came)
            self._came, self.awaited = (), NOTHING_HELD

    def _empty(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Of what is due, that which is not given, too."""
        return [one for one in self.due if not any(overlap(one, other) for other in given)]

    @property
    def disturbed(self) -> bool:
        """Whether what it holds has been written or freed."""
        return self.rewritten or any(held.freed or held.changed for held in (self.given, self.awaited))

    def written_by(self, stack: Stack) -> None:
        """Its rank has just written into what it holds, or freed that. It may put back what was there, and is late."""
        self.wrote = stack
        self._rewritten_given |= not self.over and self.given.changed

    def _look_into(self, held: HeldTensors) -> None:
        """Note the race that its rank has made, where there is none yet."""
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
        """Raise the race that was found."""
        if self.error is not None:
            self._scheduler.tell(self.error)


class Works:
    """Those of all ranks."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._all: defaultdict[int, list[SimulatedWork]] = defaultdict(list)
        self._unmet: defaultdict[int, list[SimulatedWork]] = defaultdict(list)

    def add(self, work: SimulatedWork) -> SimulatedWork:
        """Keep ``work`` in mind until its rank returns, and until then what it has not waited for."""
        self._all[work.rank].append(work)
        self._unmet[work.rank].append(work)
        return work

    def pop(self, rank: int) -> Sequence[SimulatedWork]:
        """All of a rank, which has returned."""
        return self._all.pop(rank, ())

    def unmet(self, rank: int) -> list[SimulatedWork]:
        """What a rank has not waited for, but for sends that have left."""
        unmet = self._unmet[rank]
        if unmet:
            self._unmet[rank] = unmet = [one for one in unmet if not (one.met or (one.over and not one.due))]
        return unmet

    def pending_in(self, tensors: Sequence[Tensor]) -> SimulatedWork | None:
        """What the rank that has the turn has not waited for, and lies there."""
        unmet = self.unmet(self._scheduler.running)
        return next((work for work in unmet for one in tensors for due in work.due if overlap(one, due)), None)

    def claims(self, tensors: Sequence[Tensor], stack: Stack) -> None:
        """What is called now fills these buffers. Raises the race where something on its way does, too."""
        if (work := self.pending_in(tensors)) is not None:
            rank = work.rank
            said = f"rank {rank} posted two receives into one buffer"
            if work.posted_as != "received":
                said = f"rank {rank} wanted two things in one buffer, of which one was {work.text}"
            self._scheduler.tell(race("received-twice", rank, said, first_posted=work.stack, second_posted=stack))

    def uses(self, tensors: Sequence[Tensor], stack: Stack) -> None:
        """What is called now reads these. Raises the race where they have not come yet."""
        if (work := self.pending_in(tensors)) is not None:
            self._scheduler.tell(read_early(work, stack))


def read_early(work: SimulatedWork, stack: Stack) -> Race:
    """The race of who uses what this work is to fill, here."""
    said = f"rank {work.rank} used a buffer before {work.text} had been waited for"
    return race("read-before-wait", work.rank, said, used=stack, **{work.posted_as: work.stack})
