"""Who decides a simulated run's next step: by chance, with one kind of bad luck for the whole run, or by a guide.

A seed names the adversary and draws its choices: consecutive seeds rotate, so 20 of them have each three times. Each
now and then decides by plain chance, so no rank or message that can go on waits for ever. With a guide every rank goes
on until it waits, except at preemptions.
"""

import argparse
import re
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from pipeproof.wings.simulated.engine.events import Actor, Event, History

IN_TURN = "in-turn"
_FAIR = 32  # one decision in so many is by plain chance
_STEPS = 40  # of each rank: about how many decisions a small run has
_DEPTH = 3  # of a fault: orderings that must fall together for it

# Chooses the next step: a ready rank gets the turn, or a message moves. Of all that are able, ranks come before
# messages, and messages in the order in which they became able.
Choose = Callable[[Sequence[Actor]], Actor]


def _newest_first(random: Random, ranks: int) -> Choose:
    """Messages overtake each other wherever allowed."""

    def choose(able: Sequence[Actor]) -> Actor:
        chosen = random.choice(able)
        return chosen if isinstance(chosen, int) else able[-1]

    return choose


def _longest_delay(random: Random, ranks: int) -> Choose:
    """Messages move only when no rank can go on."""
    return lambda able: random.choice([one for one in able if isinstance(one, int)] or able)


def _no_delay(random: Random, ranks: int) -> Choose:
    """Messages move immediately."""
    return lambda able: random.choice([one for one in able if not isinstance(one, int)] or able)


def _one_starved(random: Random, ranks: int) -> Choose:
    """One rank gets the turn only when nothing else can happen."""
    victim = random.randrange(ranks)
    return lambda able: random.choice(others) if (others := [one for one in able if one != victim]) else victim


def _priorities(random: Random, ranks: int) -> Choose:
    """The actor with highest priority goes first, and at a few steps falls behind all others; messages are one actor.

    Probabilistic concurrency testing, by Burckhardt, Kothari, Musuvathi and Nagarakatti (ASPLOS 2010).
    """
    order = random.sample(range(ranks + 1), ranks + 1)  # the highest first; messages have the last number
    falls = {random.randrange(_STEPS * ranks) for _ in range(_DEPTH - 1)}
    steps = 0

    def choose(able: Sequence[Actor]) -> Actor:
        nonlocal steps
        there = {one if isinstance(one, int) else ranks for one in able}
        first = next(one for one in order if one in there)
        if steps in falls:
            order.remove(first)
            order.append(first)
            first = next(one for one in order if one in there)
        steps += 1
        return random.choice([one for one in able if not isinstance(one, int)]) if first == ranks else first

    return choose


ADVERSARIES: Mapping[str, Callable[[Random, int], Choose]] = {
    "by chance": lambda random, ranks: random.choice,
    "one rank starved": _one_starved,
    "newest message first": _newest_first,
    "longest delay": _longest_delay,
    "no delay": _no_delay,
    "priorities": _priorities,
}


def name_of(seed: int) -> str:
    """Return the adversary's name under this seed."""
    return list(ADVERSARIES)[seed % len(ADVERSARIES)]


def fair(seed: int, ranks: int) -> Choose:
    """Return a seed's adversary with an occasional decision by plain chance."""
    random = Random(seed)
    choose = ADVERSARIES[name_of(seed)](random, ranks)
    return lambda able: choose(able) if random.randrange(_FAIR) else random.choice(able)


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
        self._last: Actor = -1  # no rank yet

    def next(self, able: Sequence[Actor]) -> tuple[Actor, int]:
        """Return the next actor without preemption, and the number of its event.

        It is the previous rank, else the first rank that can go on, else a message.
        """
        ranks = [one for one in able if isinstance(one, int)]
        actor = self._last if self._last in ranks else min(ranks, default=able[0])
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

    ``astray``: the actor of a preemption could not go: the run differs from the recorded one.
    """

    def __init__(self, guide: Guide, history: History) -> None:
        self.redundant: int | None = None
        self.astray = False
        self._history = history
        self._asleep = dict(guide.asleep)
        self._first = guide.first
        self._turns = Turns()
        self._expected: defaultdict[tuple[Actor, int], deque[Actor]] = defaultdict(deque)
        for one in guide.preemptions:
            self._expected[one.actor, one.count].append(one.by)

    def choose(self, able: Sequence[Actor]) -> Actor:
        """Choose, see ``Choose``. A sleeper wakes once its next event meets the last one."""
        if len(self._history.events) > self._first:
            last = self._history.events[-1]
            self._asleep = {
                one: event for one, event in self._asleep.items() if one != last.actor and not event.meets(last)
            }
        number, expected = self._history.now + 1, self._expected.get(self._turns.next(able))
        actor = expected.popleft() if expected else None
        if actor is None or actor not in able:
            self.astray |= actor is not None
            awake = [one for one in able if number < self._first or one not in self._asleep]
            if not awake and self.redundant is None:
                self.redundant = number
            actor, _ = self._turns.next(awake or able)
        self._turns.take(actor)
        return actor
