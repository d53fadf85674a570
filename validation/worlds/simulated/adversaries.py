"""Who decides what happens next in a simulated run: by chance, or with one kind of bad luck for the whole run.

A seed names the adversary and draws what it does: seeds in a row take turns, so that 20 of them have each three times.
Each now and then decides by plain chance, so that nobody waits for ever for a rank, or a message, that could go on.
"""

from collections.abc import Collection, Mapping, Sequence
from random import Random
from typing import Protocol

from pipeproof.worlds.simulated.event import Actor

_FAIR = 32  # one decision in so many is by plain chance
_STEPS = 40  # of each rank: about how many decisions a small run has
_DEPTH = 3  # of a fault: orderings that must fall together for it


class Adversary(Protocol):
    """Chooses one of what can happen: a rank of those that are ready has the turn, or a message moves.

    ``moves``: the messages that can; the first of them was the first that could. What is chosen is a rank's place in
    ``ready``, or that of a move behind all of them.
    """

    def choose(self, ready: Sequence[Actor], moves: Sequence[Actor]) -> int: ...


class Uniform:
    """Everything alike."""

    def __init__(self, random: Random, ranks: int) -> None:
        self.random = random

    def choose(self, ready: Sequence[Actor], moves: Sequence[Actor]) -> int:
        return self.random.randrange(len(ready) + len(moves))


class NewestFirst(Uniform):
    """Messages overtake each other wherever they may."""

    def choose(self, ready: Sequence[Actor], moves: Sequence[Actor]) -> int:
        chosen = super().choose(ready, moves)
        return chosen if chosen < len(ready) else len(ready) + len(moves) - 1


class Longest(Uniform):
    """Messages move only where no rank can go on without them."""

    def choose(self, ready: Sequence[Actor], moves: Sequence[Actor]) -> int:
        return super().choose(ready, () if ready else moves)


class Soonest(Uniform):
    """Messages move as soon as they can."""

    def choose(self, ready: Sequence[Actor], moves: Sequence[Actor]) -> int:
        return len(ready) + self.random.randrange(len(moves)) if moves else super().choose(ready, ())


class Starving(Uniform):
    """One rank has the turn only where nothing else can happen."""

    def __init__(self, random: Random, ranks: int) -> None:
        super().__init__(random, ranks)
        self._victim = random.randrange(ranks)

    def choose(self, ready: Sequence[Actor], moves: Sequence[Actor]) -> int:
        others = [k for k, rank in enumerate(ready) if rank != self._victim]
        others += range(len(ready), len(ready) + len(moves))
        return self.random.choice(others) if others else 0


class Priorities(Uniform):
    """The one of highest priority, which falls behind all others at a few steps: messages are one more rank.

    Probabilistic concurrency testing, by Burckhardt, Kothari, Musuvathi and Nagarakatti (ASPLOS 2010).
    """

    def __init__(self, random: Random, ranks: int) -> None:
        super().__init__(random, ranks)
        self._network = ranks  # its number among ranks
        self._order: list[Actor] = random.sample(range(ranks + 1), ranks + 1)  # the highest first
        self._falls = {random.randrange(_STEPS * ranks) for _ in range(_DEPTH - 1)}
        self._steps = 0

    def choose(self, ready: Sequence[Actor], moves: Sequence[Actor]) -> int:
        able = [*ready, self._network] if moves else [*ready]
        if self._steps in self._falls:
            self._order.append(self._order.pop(self._order.index(self._first(able))))
        self._steps += 1
        first = self._first(able)
        return len(ready) + self.random.randrange(len(moves)) if first == self._network else list(ready).index(first)

    def _first(self, able: Collection[Actor]) -> Actor:
        return next(one for one in self._order if one in able)


ADVERSARIES: Mapping[str, type[Uniform]] = {
    "by chance": Uniform,
    "one rank starved": Starving,
    "newest message first": NewestFirst,
    "longest delay": Longest,
    "no delay": Soonest,
    "priorities": Priorities,
}


def name_of(seed: int) -> str:
    """The name of the adversary that decides under this seed."""
    return list(ADVERSARIES)[seed % len(ADVERSARIES)]


class Fair:
    """The adversary of a seed, but for a decision by plain chance now and then."""

    def __init__(self, seed: int, ranks: int) -> None:
        self.random = Random(seed)
        self._adversary: Adversary = ADVERSARIES[name_of(seed)](self.random, ranks)
        self._chance = Uniform(self.random, ranks)

    def choose(self, ready: Sequence[Actor], moves: Sequence[Actor]) -> int:
        """As ``Adversary`` does."""
        by = self._adversary if self.random.randrange(_FAIR) else self._chance
        return by.choose(ready, moves)
