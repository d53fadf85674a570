"""What a call into the simulated network gives back: a work that is done when the network says so."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from torch import Tensor
from torch._C._distributed_c10d import Work

from pipeproof.worlds.rank_report import Race
from pipeproof.worlds.simulated.communicator import Communicator
from pipeproof.worlds.simulated.held import NOTHING_HELD, HeldTensors
from pipeproof.worlds.simulated.races import clear, fit, overlap, poison, race
from pipeproof.worlds.simulated.scheduler import Scheduler, Wait
from pipeproof.worlds.simulated.torch_inside import places_of, unwatched
from pipeproof.worlds.stack import Stack

if TYPE_CHECKING:
    from torch.futures import Future

_NO_TIMEOUT = timedelta(0)


class SimulatedWork(Work):
    """A message's end or a rank's part of a collective, from its call to the moment when it has been waited for.

    Neither ``given`` nor ``due`` may be written meanwhile, or freed. ``due`` hold poison, where they are not given too:
    what has come is written into them when they are waited for, as late as any transport may. ``posted_as``: what its
    call did, in a word. ``wrote``: the lines that are known to have written or freed what it holds. ``on_stream``: a
    device comes to it, after all that it waits for. Who waits for it then makes that wait, but where ``holds_program``;
    ``left`` tells that its rank has gone on without what it brings. ``rewritten``: a function has written into what is
    due, if only the same bits, as a number added to what is no number leaves them.
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
        self.posted = self.moved = scheduler.now
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
        self.left = False
        self.holds_program = self.rewritten = False
        self.error: Race | None = None
        self._scheduler = scheduler
        self._wait = wait
        self._came: Sequence[Tensor] = ()
        self._waiting = False
        self._on_stream = on_stream
        poison(self._empty(given))
        self.given, self.awaited = HeldTensors(given), HeldTensors(due)
        self.places = frozenset(place for tensor in (*given, *due) for place in places_of(tensor))
        if scheduler.history is not None and given:
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
        if self.left and self._scheduler.ahead is not None:
            self._scheduler.ahead.comes(self.name, came)
        else:
            self._look_into(self.given)
        self.given = NOTHING_HELD
        self._came, self.over = came, True
        self.moved, self.done_s = self._scheduler.now, max(at_s, self.posted_s)
        self._scheduler.touch(("work", self.name), changes=True)
        if self._waiting:
            self._scheduler.wake(self.rank)

    def hold(self, *, for_device: bool = False) -> bool:
        """Go on only once it is done: that is no wait of the user's. Whether it is: who goes ahead may do so before."""
        if not self.over:
            self._waiting = True
            ahead = self._scheduler.ahead if for_device else None
            goes_on = ahead is not None and ahead.goes_on(self.rank)
            self._scheduler.block(self._wait, for_device=goes_on, by_device=self._on_stream)
            self._waiting = False
            if not self.ended():
                return False
        self._scheduler.needed(self.moved)
        self._scheduler.clock.reach(self.done_s)
        return True

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
            if not work.hold(for_device=for_device):
                for one in self.together:
                    one._meet() if one.over else one._leave()
                break
            work._meet()
        return True

    @unwatched
    def catch_up(self) -> None:
        """Wait for what its rank went on without: it is there, unless its rank has put something else there since."""
        if self.left:
            self.hold()
            self.left = False
            self.check()
            if not self.awaited.changed:
                self.awaited.fill(self._came)
            self._came, self.awaited = (), NOTHING_HELD

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
            if (history := self._scheduler.history) is not None:
                history.needed(self.moved)
                history.takes_back(self.name)
            self._look_into(self.awaited)
            self.check()
            self.awaited.fill(self._came)
            self._came, self.awaited = (), NOTHING_HELD

    def _leave(self) -> None:
        """Its rank goes on without what it brings. What it does to the buffers from now on a device does later."""
        if not self.met:
            for held in (self.given, self.awaited):
                self._look_into(held)
            self.check()
            self.given.let_go()
            self.met = self.left = True
            ahead = self._scheduler.ahead
            assert ahead is not None, "nobody leaves a work otherwise"
            if fit(contents := ahead.leaves(self.name), self.due):
                self.awaited.fill(contents)
            else:
                clear(self._empty(self.given.tensors))
            self.awaited = HeldTensors(self.due)
            ahead.on_device.add([*self.given.tensors, *self.due])
            if (history := self._scheduler.history) is not None:
                history.takes_back(self.name)

    def _empty(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Of what is due, that which is not given, too."""
        return [one for one in self.due if not any(overlap(one, other) for other in given)]

    @property
    def disturbed(self) -> bool:
        """Whether what it holds has been written or freed."""
        return self.rewritten or any(held.freed or held.changed for held in (self.given, self.awaited))

    def _look_into(self, held: HeldTensors) -> None:
        """Note the race that its rank has made, where there is none yet."""
        changed = held.changed or (self.rewritten and held is self.awaited)
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
