"""What a bench measured of some configs that took turns: medians, how far rounds are apart, and ratios to the first."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

FEWEST = 3  # rounds: with fewer nobody knows how far they are apart


@dataclass(frozen=True)
class Turn:
    """What one rank saw in one turn: how long each step took, the losses that it knows, and bytes (0: not counted).

    The bytes are those of its parameters, and the most that its step allocates beyond them.
    """

    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    bytes: int = 0


@dataclass(frozen=True)
class Timing:
    """One config: its file's name, what of it was run, and what a step of that computes.

    rounds: the median step of each, in seconds; a step takes as long as its slowest rank. bytes: at most, by rank.
    losses: how many were seen. strange: those of them that are not finite.
    """

    name: str
    runs: str
    work: str
    rounds: tuple[float, ...] = ()
    bytes: tuple[int, ...] = ()
    losses: int = 0
    strange: tuple[float, ...] = ()

    def after(self, turns: Sequence[Turn]) -> "Timing":
        """With one more turn, of all its ranks."""
        steps = [max(times) for times in zip(*(turn.seconds for turn in turns), strict=True)]
        losses = [loss for turn in turns for loss in turn.losses]
        counted = tuple(turn.bytes for turn in turns)
        return replace(
            self,
            rounds=(*self.rounds, *([median(steps)] if steps else [])),
            bytes=counted if any(counted) else self.bytes,
            losses=self.losses + len(losses),
            strange=(*self.strange, *(loss for loss in losses if not math.isfinite(loss))),
        )

    @property
    def seconds(self) -> float:
        """Of a step: the median of all rounds."""
        return median(self.rounds)

    @property
    def spread(self) -> float:
        """How far the slowest round is from the fastest, in medians."""
        return (max(self.rounds) - min(self.rounds)) / self.seconds


@dataclass(frozen=True)
class Ratio:
    """How many times as long a step of ``other`` takes as one of ``first``, which it took turns with."""

    first: Timing
    other: Timing

    @property
    def rounds(self) -> list[float]:
        """That of each round: what slows the machine for a while slows both, and is in none."""
        return [other / first for first, other in zip(self.first.rounds, self.other.rounds, strict=True)]

    @property
    def value(self) -> float:
        """The median over rounds."""
        return median(self.rounds)

    @property
    def noise(self) -> bool:
        """Whether it cannot be told from noise: it is as near to 1 as rounds' are to each other, or they are too few.

        So it is where 1 lies within their range, and where they are all on one side of it, but further apart than that.
        """
        return len(self.rounds) < FEWEST or max(self.value, 1 / self.value) <= max(self.rounds) / min(self.rounds)
