"""A run with known decisions: every rank goes on until it waits, except at preemptions."""

import argparse
import re
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeproof.wings.simulated.engine.events import Actor, Event, History

IN_TURN = "in-turn"


@dataclass(frozen=True)
class Preemption:
    """At event number ``count`` of ``actor``, another actor goes first: ``by``."""

    actor: Actor
    count: int
    by: Actor

    def __str__(self) -> str:
        return f"{_word(self.actor)}@{self.count}={_word(self.by)}"


@dataclass(frozen=True)
class Guide:
    """Preemptions of a run. ``asleep``: actors that need not come next, because another run had them there.

    ``first``: number of the event at which they sleep.
    """

    preemptions: tuple[Preemption, ...] = ()
    asleep: Mapping[Actor, Event] = field(default_factory=dict)
    first: int = 0

    def __str__(self) -> str:
        return ",".join((IN_TURN, *map(str, self.preemptions)))


def parse_interleaving(text: str) -> int | Guide:
    """Parse an option: a seed or a guide. Raises argparse's error for users."""
    try:
        return int(text) if text.lstrip("-").isdigit() else guide_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def guide_of(text: str) -> Guide:
    """Parse a guide. Raises ValueError for other text."""
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
    """Count each actor's events, to find the next preemption."""

    def __init__(self) -> None:
        self._done: defaultdict[Actor, int] = defaultdict(int)
        self._last: Actor | None = None

    def next(self, able: Sequence[Actor]) -> tuple[Actor, int]:
        """Return the next actor without preemption, and the number of its event.

        It is the previous rank, else the first rank that can go on, else a message.
        """
        ranks = [one for one in able if isinstance(one, int)]
        actor = self._last if self._last in ranks else min(ranks, default=able[0])
        assert actor is not None, "somebody is able"
        return actor, self._done[actor]

    def take(self, actor: Actor) -> None:
        """Count a turn of this actor."""
        self._done[actor] += 1
        if isinstance(actor, int):
            self._last = actor


def preemptions(events: Sequence[Event]) -> tuple[Preemption, ...]:
    """Return the preemptions of a run with these events."""
    turns, found = Turns(), []
    for event in events:
        actor, count = turns.next(event.able)
        if event.actor != actor:
            found.append(Preemption(actor, count, event.actor))
        turns.take(event.actor)
    return tuple(found)


class Guided:
    """An adversary that follows a guide. ``redundant``: the event from which another run had all the rest.

    ``astray``: the actor of a preemption that could not go: the run differs from the recorded one.
    """

    def __init__(self, guide: Guide, history: History) -> None:
        self.redundant: int | None = None
        self.astray: Actor | None = None
        self._history = history
        self._asleep = dict(guide.asleep)
        self._first = guide.first
        self._turns = Turns()
        self._expected: defaultdict[tuple[Actor, int], deque[Actor]] = defaultdict(deque)
        for one in guide.preemptions:
            self._expected[one.actor, one.count].append(one.by)

    def choose(self, able: Sequence[Actor]) -> Actor:
        """Choose, see ``Adversary``."""
        self._forget()
        actor = self._choose(able)
        self._turns.take(actor)
        return actor

    def _choose(self, able: Sequence[Actor]) -> Actor:
        following, number = self._turns.next(able), self._history.now + 1
        if expected := self._expected.get(following):
            by = expected.popleft()
            if by in able:
                return by
            self.astray = by
        awake = [one for one in able if number < self._first or one not in self._asleep]
        if not awake and self.redundant is None:
            self.redundant = number
        return self._turns.next(awake or able)[0]

    def _forget(self) -> None:
        """Wake sleepers whose next event meets the last one."""
        if len(self._history.events) > self._first:
            last = self._history.events[-1]
            self._asleep = {
                one: event for one, event in self._asleep.items() if one != last.actor and not event.meets(last)
            }
