"""Wrong numbers: compare one with numbers that a step may compute by mistake."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from pipeproof.core.limits import FP32
from pipeproof.core.observe.likeness import NARROWER
from pipeproof.explain.limits import CLOSE


class Candidate(NamedTuple):
    """A number that a step may compute by mistake, in words; its kind of cause, and the stage if known."""

    words: str
    value: float
    kind: str = ""
    stage: int | None = None


def is_near(one: float | None, other: float | None, noise: float = 0.0) -> bool:
    """True if two numbers agree up to summation order; ``noise`` is a relative error beside fp32 sums."""
    return one is not None and other is not None and abs(one - other) <= max(CLOSE, FP32.least, noise) * abs(other)


def find_candidate(value: float, candidates: Iterable[Candidate], noise: float = 0.0) -> Candidate | None:
    """Return the first candidate equal to ``value``, or None. All candidates are finite."""
    if not math.isfinite(value):
        return Candidate("not finite, though all that it is formed of is", value)
    return next((one for one in candidates if is_near(value, one.value, noise)), None)


def round_candidates(right: float) -> list[Candidate]:
    """The ``right`` number in narrower types."""
    whole = torch.tensor(right, dtype=torch.float64)
    return [Candidate(f"the right one, {name}-rounded", whole.to(dtype).item()) for name, dtype in NARROWER.items()]


def multiples(right: float, counts: Iterable[int]) -> list[Candidate]:
    """The ``right`` number multiplied and divided by each of ``counts``."""
    wanted = sorted({count for count in counts if count > 1})
    times = [Candidate(f"{count} times the right one", right * count) for count in wanted]
    return times + [Candidate(f"1/{count} of the right one", right / count) for count in wanted]
