"""What a bench measured of some configs that took turns: medians, how far rounds are apart, and ratios to the first."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from pipeproof.cases.timed_step import Turn

FEWEST = 3  # rounds: with fewer nobody knows how far they are apart


@dataclass(frozen=True)
class Timing:
    """One config. ``name``: its file. ``runs``: what of it was run. ``work``: what a step of that computes.

    rounds: the median step of each round, in seconds; a step takes as long as its slowest rank. bytes: at most, by rank.
    """

    name: str
    runs: str
    work: str
    rounds: tuple[float, ...] = ()
    bytes: tuple[int, ...] = ()
    losses: tuple[float, ...] = ()

    def with_turn(self, turns: Sequence[Turn]) -> "Timing":
        """After one more turn, of all its ranks."""
        steps = [max(times) for times in zip(*(turn.seconds for turn in turns), strict=True)]
        counted = tuple(turn.bytes for turn in turns)
        losses = tuple(loss for turn in turns for loss in turn.losses)
        return Timing(
            self.name,
            self.runs,
            self.work,
            (*self.rounds, *([median(steps)] if steps else [])),
            counted if any(counted) else self.bytes,
            (*self.losses, *losses),
        )

    @property
    def seconds(self) -> float:
        """Of a step: the median of all rounds."""
        return median(self.rounds)

    @property
    def spread(self) -> float:
        """How far the slowest round is from the fastest, in medians."""
        return (max(self.rounds) - min(self.rounds)) / self.seconds

    @property
    def strange(self) -> list[float]:
        """Losses that are not finite."""
        return [loss for loss in self.losses if not math.isfinite(loss)]


@dataclass(frozen=True)
class Ratio:
    """How many times as long a step of ``other`` takes as one of ``first``, which it took turns with."""

    first: Timing
    other: Timing

    @property
    def value(self) -> float:
        """The median over rounds: what slows the machine for a while slows both."""
        pairs = zip(self.first.rounds, self.other.rounds, strict=True)
        return median(other / first for first, other in pairs)

    @property
    def spread(self) -> float:
        """That of either, the larger."""
        return max(self.first.spread, self.other.spread)

    @property
    def noise(self) -> bool:
        """Whether it is too near to 1 to be told from noise, or rounds are too few to know."""
        return len(self.first.rounds) < FEWEST or abs(self.value - 1) <= self.spread
