"""Bench results for configs in turns: medians, spreads, and ratios to the first."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

FEWEST = 3  # rounds: fewer show no spread


@dataclass(frozen=True)
class Turn:
    """A rank's measurements in one turn: step times, known losses, and bytes (0: uncounted).

    bytes: parameters, plus the step's peak allocation beyond them.
    """

    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    bytes: int = 0


class Ratio(NamedTuple):
    """Step times of one config over those of another, by round and in the median.

    noise: true if noise may explain the ratio: as near to 1 as rounds are to each other, or too few rounds.
    """

    rounds: tuple[float, ...]
    value: float
    noise: bool


@dataclass(frozen=True)
class Timing:
    """A config's results: file name, what ran, and the work in a step.

    rounds: median step time per round, in seconds; the slowest rank sets a step's time. bytes: peak by rank. losses:
    number observed. strange: non-finite ones.
    """

    name: str
    runs: str
    work: str
    rounds: tuple[float, ...] = ()
    bytes: tuple[int, ...] = ()
    losses: int = 0
    strange: tuple[float, ...] = ()

    def after(self, turns: Sequence[Turn]) -> "Timing":
        """Add one turn from all ranks."""
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
        """Median step time over all rounds."""
        return median(self.rounds)

    @property
    def spread(self) -> float:
        """Gap between slowest and fastest round, in medians."""
        return (max(self.rounds) - min(self.rounds)) / self.seconds

    def ratio_to(self, first: "Timing") -> Ratio:
        """Compare step times with those of ``first``, measured in turns."""
        # Round by round: a temporary slowdown affects both, and cancels.
        rounds = tuple(own / other for other, own in zip(first.rounds, self.rounds, strict=True))
        value = median(rounds)
        # This covers ranges around 1, and ranges on one side wider than their distance to 1.
        noise = len(rounds) < FEWEST or max(value, 1 / value) <= max(rounds) / min(rounds)
        return Ratio(rounds, value, noise)
