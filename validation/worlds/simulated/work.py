"""What a call into the simulated network gives back: a work that is done when the network says so."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from torch import Tensor
from torch._C._distributed_c10d import Work

from pipeproof.worlds.rank_report import Race
from pipeproof.worlds.simulated.races import fill, poison, race, unchanged
from pipeproof.worlds.simulated.scheduler import Scheduler, Wait
from pipeproof.worlds.stack import Stack

if TYPE_CHECKING:
    from torch.futures import Future

_NO_TIMEOUT = timedelta(0)


class SimulatedWork(Work):
    """A message's end or a rank's part of a collective, from its call to the moment when it has been waited for.

    ``given`` must not change meanwhile, and ``due`` hold poison: what has come is written into them when they are
    waited for, as late as any transport may.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        wait: Callable[[], Wait],
        stack: Stack,
        given: Sequence[Tensor],
        due: Sequence[Tensor],
    ) -> None:
        super().__init__()
        self.rank = scheduler.running
        self.name = scheduler.call()
        self.posted = self._moved = scheduler.now
        self.posted_s = self._done_s = scheduler.clock.now_s
        self.stack = stack
        self.due = due
        self.source = -1
        self.over = False  # on the network
        self.met = False  # by its rank
        self.error: Race | None = None
        self._scheduler = scheduler
        self._wait = wait
        self._given = given
        self._before = [tensor.data.clone() for tensor in given]
        self._came: Sequence[Tensor] = ()
        self._waiting = False
        poison(due)
        if scheduler.history is not None:
            scheduler.history.gives(self.name, given)

    @property
    def text(self) -> str:
        """What it is, as one waits for it."""
        return self._wait().text

    def end(self, came: Sequence[Tensor] = (), *, at_s: float = 0.0) -> None:
        """It is done, at ``at_s`` of the ranks' clocks: ``came`` is for its buffers.

        Only now is it known whether what was given has changed too early: who has an answer to a message may change
        what it sent, also before it waits for that.
        """
        if self.error is None and not unchanged(self._given, self._before):
            said = f"rank {self.rank} wrote into a buffer while {self.text} was on its way"
            self.error = race("overwritten-in-flight", self.rank, said, sent=self.stack)
        self._given, self._before = (), []
        self._came, self.over = came, True
        self._moved, self._done_s = self._scheduler.now, max(at_s, self.posted_s)
        self._scheduler.touch(("work", self.name), changes=True)
        if self._waiting:
            self._scheduler.wake(self.rank)

    def hold(self) -> None:
        """Go on only once it is done: that is no wait of the user's."""
        if not self.over:
            self._waiting = True
            self._scheduler.block(self._wait)
            self._scheduler.needed(self._moved)
            self._scheduler.clock.reach(self._done_s)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Until it is done. Time is not real, so nothing ever times out: what never comes is a deadlock."""
        if self.met:
            return True
        if self.over:
            self._scheduler.pause()
        self.hold()
        self._meet()
        return True

    def is_completed(self) -> bool:
        """Whether it is done; who is told so may use the buffers."""
        self._scheduler.pause()
        if self._scheduler.ask(("work", self.name), lambda: self.over):
            self._meet()
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
            self._scheduler.clock.reach(self._done_s)
            if (history := self._scheduler.history) is not None:
                history.needed(self._moved)
                history.takes_back(self.name)
            self.check()
            fill(self.due, self._came)
            self._came = ()

    def check(self) -> None:
        """Raise the race that was found."""
        if self.error is not None:
            raise self.error
