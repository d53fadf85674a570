"""Adversaries decide a simulated run's next step: by chance, or with one kind of bad luck for the whole run.

A seed names the adversary and draws its choices: consecutive seeds rotate, so 20 of them have each three times. Each
now and then decides by plain chance, so no rank or message that can go on waits for ever.
"""

from collections.abc import Collection, Mapping, Sequence
from random import Random
from typing import Protocol

from pipeproof.wings.simulated.engine.events import Actor

_FAIR = 32  # one decision in so many is by plain chance
_STEPS = 40  # of each rank: about how many decisions a small run has
_DEPTH = 3  # of a fault: orderings that must fall together for it


class Adversary(Protocol):
    """Chooses the next step: a ready rank gets the turn, or a message moves.

    In ``able`` ranks come before messages, and messages in the order in which they became able.
    """

    def choose(self, able: Sequence[Actor]) -> Actor: ...


class Uniform:
    """Everything alike."""

    def __init__(self, random: Random, ranks: int) -> None:
        self.random = random

    def choose(self, able: Sequence[Actor]) -> Actor:
        return able[self.random.randrange(len(able))]


class NewestFirst(Uniform):
    """Messages overtake each other wherever allowed."""

    def choose(self, able: Sequence[Actor]) -> Actor:
        chosen = super().choose(able)
        return chosen if isinstance(chosen, int) else able[-1]


class Longest(Uniform):
    """Messages move only when no rank can go on."""

    def choose(self, able: Sequence[Actor]) -> Actor:
        return super().choose([one for one in able if isinstance(one, int)] or able)


class Soonest(Uniform):
    """Messages move immediately."""

    def choose(self, able: Sequence[Actor]) -> Actor:
        return super().choose([one for one in able if not isinstance(one, int)] or able)


class Starving(Uniform):
    """One rank gets the turn only when nothing else can happen."""

    def __init__(self, random: Random, ranks: int) -> None:
        super().__init__(random, ranks)
        self._victim = random.randrange(ranks)

    def choose(self, able: Sequence[Actor]) -> Actor:
        others = [one for one in able if one != self._victim]
        return self.random.choice(others) if others else self._victim


class Priorities(Uniform):
    """The actor with highest priority goes first, and at a few steps falls behind all others; messages are one actor.

    Probabilistic concurrency testing, by Burckhardt, Kothari, Musuvathi and Nagarakatti (ASPLOS 2010).
    """

    def __init__(self, random: Random, ranks: int) -> None:
        super().__init__(random, ranks)
        self._network = ranks  # its number among ranks
        self._order: list[Actor] = random.sample(range(ranks + 1), ranks + 1)  # the highest first
        self._falls = {random.randrange(_STEPS * ranks) for _ in range(_DEPTH - 1)}
        self._steps = 0

    def choose(self, able: Sequence[Actor]) -> Actor:
        messages = [one for one in able if not isinstance(one, int)]
        ranks = {one if isinstance(one, int) else self._network for one in able}
        if self._steps in self._falls:
            self._order.append(self._order.pop(self._order.index(self._first(ranks))))
        self._steps += 1
        first = self._first(ranks)
        return super().choose(messages) if first == self._network else first

    def _first(self, ranks: Collection[int]) -> Actor:
        return next(one for one in self._order if one in ranks)


ADVERSARIES: Mapping[str, type[Uniform]] = {
    "by chance": Uniform,
    "one rank starved": Starving,
    "newest message first": NewestFirst,
    "longest delay": Longest,
    "no delay": Soonest,
    "priorities": Priorities,
}


def name_of(seed: int) -> str:
    """Return the adversary's name under this seed."""
    return list(ADVERSARIES)[seed % len(ADVERSARIES)]


class Fair:
    """A seed's adversary with an occasional decision by plain chance."""

    def __init__(self, seed: int, ranks: int) -> None:
        self.random = Random(seed)
        self._adversary: Adversary = ADVERSARIES[name_of(seed)](self.random, ranks)
        self._chance = Uniform(self.random, ranks)

    def choose(self, able: Sequence[Actor]) -> Actor:
        """Choose, see ``Adversary``."""
        return (self._adversary if self.random.randrange(_FAIR) else self._chance).choose(able)
