"""Who runs next: ranks are threads of which one has the turn; an adversary decides whose it is, or what moves."""

import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import ClassVar, NoReturn, Protocol

from pipeproof.wings.simulated.engine.adversaries import Adversary
from pipeproof.wings.simulated.engine.clock import Clock
from pipeproof.wings.simulated.engine.events import Actor, History, Message
from pipeproof.worlds.rank_report import Race
from pipeproof.worlds.timeout import END_S, LOOK_S

STRANGERS = "torch.distributed in threads that a rank starts"
_PATIENCE = 2  # how often one may ask for the same in vain before it is known to go round and round


class NotSimulated(NotImplementedError):
    """What the simulated world does not have.

    ``refusals``: all of this run, with the threads that they were made on: code that catches one goes on with what no
    real rank would have.
    """

    refusals: ClassVar[list[tuple[threading.Thread, str]]] = []

    def __init__(self, what: str) -> None:
        super().__init__(f"the simulated world has no {what}: run this on real ranks, in World()")
        self.refusals.append((threading.current_thread(), str(self)))


class AnotherRanks(RuntimeError):
    """A rank has what is another's: some code keeps it where ranks that are threads share it."""

    def __init__(self, what: str, rank: int, owner: str) -> None:
        super().__init__(
            f"rank {rank} used a {what} of {owner}: it is kept in a module, a class or a cache, which simulated ranks "
            "share and processes do not: run this on real ranks, in World()"
        )


class Over(BaseException):
    """The run has ended: whoever is still waiting gives up. No user's code catches it by name."""


@dataclass(frozen=True)
class Wait:
    """What a rank waits for, in words, and the ranks that could end that; none: all that do not wait for the same."""

    text: str
    peers: tuple[int, ...] = ()


class State(Protocol):
    """What a rank finds as it left it when its turn comes."""

    def take(self) -> None: ...
    def leave(self) -> None: ...


@dataclass
class Seat:
    """One rank's thread, and where it stands. ``wait`` tells, while it cannot go on, what for.

    ``for_device``: a device would wait in its place, and its program go on. ``by_device``: a device brings what it
    waits for; else another program can at once.
    """

    rank: int
    state: State
    clock: Clock
    thread: threading.Thread | None = None
    turn: threading.Lock = field(default_factory=threading.Lock)
    wait: Callable[[], Wait] | None = None
    for_device: bool = False
    by_device: bool = False
    ended: bool = False

    @property
    def frame(self) -> FrameType | None:
        """Its innermost frame."""
        ident = None if self.thread is None else self.thread.ident
        return None if ident is None else sys._current_frames().get(ident)


class Scheduler:
    """The turns of a run. The thread that gives up its turn itself decides who is next: no other thread is needed.

    ``stuck`` is called once, when nobody can go on. ``history`` is told all.
    """

    def __init__(
        self,
        seats: Sequence[Seat],
        adversary: Adversary,
        *,
        stuck: Callable[[], None],
        history: History,
    ) -> None:
        self.seats = seats
        self.history = history
        self._adversary = adversary
        self.over = False
        self.turns = self.steps = 0  # how often a rank came back, and how often that, or a message, moved the run on
        self.strangers = False  # whether a thread that is no rank's has called
        self.done = threading.Event()
        self._ready = [seat.rank for seat in seats]
        self._moves: dict[Actor, Callable[[], None]] = {}
        self._calls: Counter[int] = Counter()
        self._asked: defaultdict[int, Counter[Hashable]] = defaultdict(Counter)
        self._spinning: set[int] = set()
        self._stuck = stuck
        self._running: int | None = None
        self._races: dict[int, Race] = {}  # the first that each rank was told of
        for seat in seats:
            seat.turn.acquire()

    @property
    def running(self) -> int:
        """The rank that has the turn."""
        assert self._running is not None, "nobody has the turn"
        return self._running

    @property
    def clock(self) -> Clock:
        """That of the rank that has the turn."""
        return self.seats[self.running].clock

    def touch(self, thing: Hashable, *, changes: bool) -> None:
        """What happens now touches this, as others may: who goes round and round until it changes goes on."""
        self.steps += changes
        self.history.touch(thing, changes=changes)
        if not changes:
            return
        for rank in [one for one in self._spinning if thing in self._asked[one]]:
            self._spinning.remove(rank)
            self._ready.append(rank)
        for asked in self._asked.values():
            asked.pop(thing, None)

    def ask(self, thing: Hashable, there: Callable[[], bool]) -> bool:
        """Whether something is there, asked by the rank that has the turn.

        Where every interleaving counts, who has asked often in vain goes round and round: its next turn comes once
        something that it asked for has changed, or where nobody else can go on.
        """
        if not self.history.kept:
            return there()
        asked = self._asked[self.running]
        asked[thing] += 1
        self.history.touch(thing, changes=False)
        if not there() and asked[thing] > _PATIENCE:
            self._ready.remove(self.running)
            self._spinning.add(self.running)
            self._hand_over(self.running)
        for one in asked:
            self.history.touch(one, changes=False)
        return there()

    def tell(self, found: Race) -> NoReturn:
        """Raise the race in the rank that has the turn, whose code may catch it."""
        self._races.setdefault(self.running, found)
        raise found

    def tell_again(self) -> None:
        """Raise the race that the rank that has the turn was told of first: what came of it counts less."""
        self._refuse_strangers()
        if (found := self._races.get(self.running)) is not None:
            raise found

    @property
    def ended(self) -> int:
        """How many ranks have."""
        return sum(seat.ended for seat in self.seats)

    def call(self) -> Message:
        """The name of what the rank that has the turn asks of the network now."""
        self._refuse_strangers()
        self.steps += 1
        self._calls[self.running] += 1
        self._asked.pop(self.running, None)
        return self.running, self._calls[self.running] - 1

    def offer(self, message: Actor, move: Callable[[], None]) -> None:
        """``message`` may move from now on; ``move`` is called once, by whoever decides that it does."""
        self._moves[message] = move

    def withdraw(self, message: Actor) -> None:
        """It may not, or not yet."""
        self._moves.pop(message, None)

    def begin(self) -> None:
        """Give somebody the first turn; to be called once all threads wait for theirs."""
        following = self._following()
        assert following is not None, "somebody is ready at the start"
        self._give(following)

    def await_turn(self, rank: int) -> None:
        """The first thing that a rank's thread does."""
        self.seats[rank].turn.acquire()
        self.seats[rank].state.take()
        self.seats[rank].clock.start()

    def pause(self) -> None:
        """Anybody may be next."""
        self._refuse_strangers()
        self._hand_over(self.running)

    def block(self, wait: Callable[[], Wait], *, for_device: bool = False, by_device: bool = False) -> None:
        """Not this rank, until somebody wakes it. ``for_device``, ``by_device``: as of ``Seat``."""
        rank = self.running
        if self.over:
            raise Over
        seat = self.seats[rank]
        seat.wait, seat.for_device, seat.by_device = wait, for_device, by_device
        self._ready.remove(rank)
        self._hand_over(rank)

    def wake(self, rank: int) -> None:
        """What a rank waited for has come."""
        if self.seats[rank].wait is not None and not self.over:
            self.seats[rank].wait = None
            self._ready.append(rank)

    def finish(self) -> None:
        """The rank that has the turn has ended: it never gets one again."""
        self.steps += 1
        seat = self.seats[self.running]
        seat.ended = True
        seat.clock.stop()
        if seat.rank in self._ready:
            self._ready.remove(seat.rank)
        seat.state.leave()
        following = self._following()
        if following is None:
            self._running = None
            self.done.set()
        else:
            self._give(following)

    def _refuse_strangers(self) -> None:
        """Raises where a thread calls that is not the rank's that has the turn; from then on in every rank's too."""
        self.strangers |= self._running is None or threading.current_thread() is not self.seats[self._running].thread
        if self.strangers:
            raise NotSimulated(STRANGERS)

    def _hand_over(self, rank: int) -> None:
        if self.over:
            raise Over
        self.turns += 1
        seat = self.seats[rank]
        seat.clock.stop()
        following = self._following()
        assert following is not None, "one that has not ended can always be next, if only to give up"
        if following != rank:
            seat.state.leave()
            self._give(following)
            seat.turn.acquire()
            seat.state.take()
        seat.clock.start()
        if self.over:
            raise Over

    def _give(self, rank: int) -> None:
        self._running = rank
        self.seats[rank].turn.release()

    def _following(self) -> int | None:
        """Who is next; None once all have ended."""
        while not self.over:
            self.history.end()
            if not self._ready and not self._moves and self._spinning:
                self._ready += sorted(self._spinning)
                self._spinning.clear()
            if not self._ready and not self._moves:
                if all(seat.ended for seat in self.seats):
                    return None
                self.seats[self.running].state.leave()  # so that what it waits for is told as of the others
                self._stuck()
                self.over = True
                break
            if (rank := self._decide()) is not None:
                return rank
        return next((seat.rank for seat in self.seats if not seat.ended), None)

    def _decide(self) -> int | None:
        """The rank that is next; None where it was a message, which has moved."""
        able = [*self._ready, *self._moves]
        chosen = self._adversary.choose(able)
        self.history.begin(chosen, able)
        if isinstance(chosen, int):
            return chosen
        self.steps += 1  # also where it touches nothing
        self._moves.pop(chosen)()
        return None


WHOLE = 5  # times the bound of one that stands still: a slow machine is no hang, and what never ends is cut


def held_up(scheduler: Scheduler, *, timeout_s: float, whole_s: float) -> str:
    """Wait until a run has ended. Empty then; else what is said of the rank that has the turn, as it goes on.

    Time counts in looks at the run, so that none passes while the machine sleeps. Who only asks moves nothing on. Of a
    run that is over it is known how it ended: who does not give up then, as one that catches all, is not waited for.
    """
    looks = came_back = moved = turns = steps = over = 0
    while not scheduler.done.wait(LOOK_S):
        looks += 1
        over += scheduler.over
        if over * LOOK_S >= min(END_S, timeout_s):
            return "does not give up"
        if scheduler.turns != turns:
            turns, came_back = scheduler.turns, looks
        if scheduler.steps != steps:
            steps, came_back, moved = scheduler.steps, looks, looks
        if (looks - came_back) * LOOK_S >= timeout_s:
            return f"did not come back to the network within {timeout_s:g} s"
        if (looks - moved) * LOOK_S >= timeout_s:
            return f"has had turn after turn, and nothing has moved for {timeout_s:g} s"
        if looks * LOOK_S >= whole_s:
            return f"still goes on after {whole_s:.3g} s, and so does the run"
    return ""
