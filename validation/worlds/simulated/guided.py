"""The adversary that follows a guide."""

from collections import defaultdict, deque
from collections.abc import Sequence

from pipeproof.worlds.simulated.event import Actor
from pipeproof.worlds.simulated.guide import Guide, Turns
from pipeproof.worlds.simulated.history import History


class Guided:
    """The adversary that follows a guide. ``redundant``: the event from which on another run has had all of it.

    ``astray``: whom a preemption named and who could not go: the run is not the one in which that was noted.
    """

    def __init__(self, guide: Guide, history: History) -> None:
        self.redundant: int | None = None
        self.astray: Actor | None = None
        self._history = history
        self._asleep = dict(guide.asleep)
        self._first = guide.first
        self._turns = Turns()
        self._due: defaultdict[tuple[Actor, int], deque[Actor]] = defaultdict(deque)
        for one in guide.preemptions:
            self._due[one.actor, one.count].append(one.by)

    def choose(self, ready: Sequence[Actor], moves: Sequence[Actor]) -> int:
        """As ``Adversary`` does."""
        able = [*ready, *moves]
        self._forget()
        actor = self._chosen(able)
        self._turns.take(actor)
        return able.index(actor)

    def _chosen(self, able: Sequence[Actor]) -> Actor:
        following, number = self._turns.next(able), self._history.now + 1
        if due := self._due.get(following):
            by = due.popleft()
            if by in able:
                return by
            self.astray = by
        awake = [one for one in able if number < self._first or one not in self._asleep]
        if not awake and self.redundant is None:
            self.redundant = number
        return self._turns.next(awake or able)[0]

    def _forget(self) -> None:
        """Whoever sleeps wakes up where the last event has touched what it would."""
        if len(self._history.events) > self._first:
            last = self._history.events[-1]
            self._asleep = {
                one: event for one, event in self._asleep.items() if one != last.actor and not event.meets(last)
            }
