"""A run whose decisions are known: every rank goes on until it waits, but where a preemption says otherwise."""

import argparse
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pipeproof.worlds.simulated.event import Actor, Event

IN_TURN = "in-turn"
MOST = 10_000  # of interleavings that differ; a right pipeline has one


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


def default(able: Sequence[Actor], last: Actor | None) -> Actor:
    """Who goes on where nothing is preempted: who had the turn, else the first rank that can, else a message."""
    ranks = [one for one in able if isinstance(one, int)]
    if last in ranks:
        return last
    return min(ranks) if ranks else able[0]


class Turns:
    """Counts what every actor has done, and so says which preemption is due."""

    def __init__(self) -> None:
        self._done: defaultdict[Actor, int] = defaultdict(int)
        self._last: Actor | None = None

    def next(self, able: Sequence[Actor]) -> tuple[Actor, int]:
        """Who goes on where nothing is preempted, and the number of the event that it would have."""
        actor = default(able, self._last)
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
