"""A run whose decisions are known: every rank goes on until it waits, but where a preemption says otherwise."""

import argparse
import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeproof.wings.simulated.engine.events import Actor, Event, History

IN_TURN = "in-turn"


@dataclass(frozen=True)
class Preemption:
    """Where ``actor`` would have its event number ``count``, another goes first: ``by``."""

    actor: Actor
    count: int
    by: Actor

    def __str__(self) -> str:
        return f"{_word(self.actor)}@{self.count}={_word(self.by)}"


@dataclass(frozen=True)
class Guide:
    """The preemptions of a run. ``asleep``: what need not come next after them, for another run had it there.

    ``first``: the number of the event at which they are asleep.
    """

    preemptions: tuple[Preemption, ...] = ()
    asleep: Mapping[Actor, Event] = field(default_factory=dict)
    first: int = 0

    def __str__(self) -> str:
        return ",".join((IN_TURN, *map(str, self.preemptions)))


def parsed_interleaving(text: str) -> int | Guide:
    """What an option says: a seed or a guide. Raises what argparse tells users of."""
    try:
        return int(text) if text.lstrip("-").isdigit() else guide_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def guide_of(text: str) -> Guide:
    """The guide that says so. Raises ValueError for other words."""
    first, *rest = text.split(",")
    found = [re.fullmatch(r"(r\d+|m\d+\.\d+)@(\d+)=(r\d+|m\d+\.\d+)", part) for part in rest]
    if first != IN_TURN or not all(found):
        raise ValueError(f"{text!r}: expected a seed, or {IN_TURN} and what differs from it, as in {IN_TURN},r0@5=m1.2")
    parts = [match.groups() for match in found if match]
    return Guide(tuple(Preemption(_actor(one), int(count), _actor(by)) for one, count, by in parts))


def _word(actor: Actor) -> str:
    return f"r{actor}" if isinstance(actor, int) else f"m{actor[0]}.{actor[1]}"


def _actor(word: str) -> Actor:
    numbers = [int(number) for number in word[1:].split(".")]
    return numbers[0] if word[0] == "r" else (numbers[0], numbers[1])


class Turns:
    """Counts what every actor has done, and so says which preemption is due."""

    def __init__(self) -> None:
        self._done: defaultdict[Actor, int] = defaultdict(int)
        self._last: Actor | None = None

    def next(self, able: Sequence[Actor]) -> tuple[Actor, int]:
        """Who goes on where nothing is preempted, and the number of the event that it would have.

        It is who had the turn, else the first rank that can go on, else a message.
        """
        ranks = [one for one in able if isinstance(one, int)]
        actor = self._last if self._last in ranks else min(ranks, default=able[0])
        assert actor is not None, "somebody is able"
        return actor, self._done[actor]

    def take(self, actor: Actor) -> None:
        """It has the turn."""
        self._done[actor] += 1
        if isinstance(actor, int):
            self._last = actor


def preemptions(events: Sequence[Event]) -> tuple[Preemption, ...]:
    """Those of a run that had these events."""
    turns, found = Turns(), []
    for event in events:
        actor, count = turns.next(event.able)
        if event.actor != actor:
            found.append(Preemption(actor, count, event.actor))
        turns.take(event.actor)
    return tuple(found)


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

    def choose(self, able: Sequence[Actor]) -> Actor:
        """As ``Adversary`` does."""
        self._forget()
        actor = self._chosen(able)
        self._turns.take(actor)
        return actor

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
