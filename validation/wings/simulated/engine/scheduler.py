"""The scheduler: ranks are threads, one with the turn; an adversary chooses the next rank or message."""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NoReturn, Protocol

from pipeproof.wings.simulated.engine.clock import Clock
from pipeproof.wings.simulated.engine.decisions import Choose
from pipeproof.wings.simulated.engine.events import Actor, History, Message
from pipeproof.worlds.rank_report import Race
from pipeproof.worlds.timeout import END_S, LOOK_S

STRANGERS = "torch.distributed in threads that a rank starts"
_PATIENCE = 2  # how often one may ask for the same in vain before it is known to go round and round


class NotSimulated(NotImplementedError):
    """A feature that the simulated world lacks.

    ``refusals``: all of this run, with their threads: code that catches one goes on in a state impossible for real
    ranks.
    """

    refusals: ClassVar[list[tuple[threading.Thread, str]]] = []

    def __init__(self, what: str) -> None:
        super().__init__(f"the simulated world has no {what}: run this on real ranks, in World()")
        self.refusals.append((threading.current_thread(), str(self)))


class AnotherRanks(RuntimeError):
    """A rank has another rank's object: some code stores it where threads share it."""

    def __init__(self, what: str, rank: int, owner: str) -> None:
        super().__init__(
            f"rank {rank} used a {what} of {owner}: it is kept in a module, a class or a cache, which simulated ranks "
            "share and processes do not: run this on real ranks, in World()"
        )


class Over(BaseException):
    """The run has ended: waiting ranks give up. A BaseException, so user code rarely catches it."""


@dataclass(frozen=True)
class Wait:
    """A rank's wait, in words, and the ranks that could end it; none: all without the same wait."""

    text: str
    peers: tuple[int, ...] = ()


class State(Protocol):
    """A rank's process-wide state, restored at each turn."""

    def take(self) -> None: ...
    def leave(self) -> None: ...


@dataclass
class Seat:
    """One rank's thread, and its position. ``wait``: describes the wait of a rank that cannot go on.

    ``for_device``: a device would wait instead, and its program go on. ``by_device``: a device brings the awaited
    thing; otherwise another program can at once.
    """

    rank: int
    state: State
    clock: Clock
    thread: threading.Thread
    turn: threading.Lock = field(default_factory=threading.Lock)
    wait: Callable[[], Wait] | None = None
    for_device: bool = False
    by_device: bool = False
    ended: bool = False


class Scheduler:
    """Turns of a run. The thread that yields its turn decides the next: no other thread is needed.

    ``moves``: messages that may move, and how; each is called once. ``stuck`` is called once, when no rank can go on.
    ``history`` records all events.
    """

    def __init__(
        self,
        seats: Sequence[Seat],
        choose: Choose,
        *,
        stuck: Callable[[], None],
        history: History,
    ) -> None:
        self.seats = seats
        self.history = history
        self._choose = choose
        self.over = False
        self.turns = self.steps = 0  # how often a rank came back, and how often that, or a message, moved the run on
        self.strangers = False  # true after a call by a foreign thread
        self.done = threading.Event()
        self._ready = [seat.rank for seat in seats]
        self.moves: dict[Actor, Callable[[], None]] = {}
        self._calls: Counter[int] = Counter()
        self._asked: defaultdict[int, Counter[Hashable]] = defaultdict(Counter)
        self._spinning: set[int] = set()
        self._stuck = stuck
        self._running: int | None = None
        self._races: dict[int, Race] = {}  # the first of each rank
        for seat in seats:
            seat.turn.acquire()

    @property
    def running(self) -> int:
        """The rank with the turn."""
        assert self._running is not None, "no rank has the turn"
        return self._running

    @property
    def clock(self) -> Clock:
        """Clock of the running rank."""
        return self.seats[self.running].clock

    def touch(self, thing: Hashable, *, changes: bool) -> None:
        """Note a shared touch in the current event; ranks that poll go on after a change."""
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
        """Return ``there()``, asked by the running rank.

        In an exploration, a rank that asks repeatedly in vain is polling: its next turn comes after a change to
        something that it asked for, or when no other rank can go on.
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
        """Raise the race in the running rank, whose code may catch it."""
        self._races.setdefault(self.running, found)
        raise found

    def tell_again(self) -> None:
        """Raise the running rank's first race again, because later ones follow from it."""
        self._refuse_strangers()
        if (found := self._races.get(self.running)) is not None:
            raise found

    def call(self) -> Message:
        """Name of the running rank's current network call."""
        self._refuse_strangers()
        self.steps += 1
        self._calls[self.running] += 1
        self._asked.pop(self.running, None)
        return self.running, self._calls[self.running] - 1

    def begin(self) -> None:
        """Give somebody the first turn; to be called once all threads wait for theirs."""
        self._give(self._following())

    def await_turn(self, rank: int) -> None:
        """Wait for a turn in a rank's thread."""
        seat = self.seats[rank]
        seat.turn.acquire()
        seat.state.take()
        seat.clock.start()

    def pause(self) -> None:
        """Yield to any rank."""
        self._refuse_strangers()
        self._hand_over(self.running)

    def block(self, wait: Callable[[], Wait], *, for_device: bool = False, by_device: bool = False) -> None:
        """Suspend this rank until another wakes it. ``for_device``, ``by_device``: see ``Seat``."""
        rank = self.running
        if self.over:
            raise Over
        seat = self.seats[rank]
        seat.wait, seat.for_device, seat.by_device = wait, for_device, by_device
        self._ready.remove(rank)
        self._hand_over(rank)

    def wake(self, rank: int) -> None:
        """Wake a rank whose wait is over."""
        if self.seats[rank].wait is not None and not self.over:
            self.seats[rank].wait = None
            self._ready.append(rank)

    def finish(self) -> None:
        """End the running rank: it never gets another turn."""
        self.steps += 1
        seat = self.seats[self.running]
        seat.ended = True
        seat.clock.stop()
        if seat.rank in self._ready:
            self._ready.remove(seat.rank)
        seat.state.leave()
        self._give(self._following())

    def _refuse_strangers(self) -> None:
        """Raise if a thread without the turn calls; from then on, raise in every rank."""
        self.strangers |= self._running is None or threading.current_thread() is not self.seats[self._running].thread
        if self.strangers:
            raise NotSimulated(STRANGERS)

    def _hand_over(self, rank: int) -> None:
        if self.over:
            raise Over
        self.turns += 1
        seat = self.seats[rank]
        seat.clock.stop()
        if (following := self._following()) == rank:
            seat.clock.start()
        else:
            seat.state.leave()
            self._give(following)
            self.await_turn(rank)
        if self.over:
            raise Over

    def _give(self, rank: int | None) -> None:
        """Give the turn to a rank; none: all have ended."""
        self._running = rank
        if rank is None:
            self.done.set()
        else:
            self.seats[rank].turn.release()

    def _following(self) -> int | None:
        """Choose the next rank; None after all ended."""
        while not self.over:
            self.history.end()
            if not self._ready and not self.moves:
                self._ready += sorted(self._spinning)
                self._spinning.clear()
            if not (able := [*self._ready, *self.moves]):
                if all(seat.ended for seat in self.seats):
                    return None
                self.seats[self.running].state.leave()  # then its wait is described like the others'
                self._stuck()
                self.over = True
                break
            chosen = self._choose(able)
            self.history.begin(chosen, able)
            if isinstance(chosen, int):
                return chosen
            self.steps += 1  # even without a touch
            self.moves.pop(chosen)()
        return next((seat.rank for seat in self.seats if not seat.ended), None)


WHOLE = 5  # times the bound of one that stands still: a slow machine is no hang, and what never ends is cut


def wait_for_end(scheduler: Scheduler, *, timeout_s: float, whole_s: float) -> str:
    """Wait for the end of a run. Returns an empty text, or a complaint about a rank that runs on.

    Time counts in looks at the run, so none passes while the machine sleeps. Polling is no progress. After the end of a
    run, a rank that does not give up, for example by catching everything, is not waited for.
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
