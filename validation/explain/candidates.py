"""Which number is it instead: one is held against those that a step may form by mistake in its place."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from pipeproof.core.limits import FP32
from pipeproof.core.observe.likeness import NARROWER
from pipeproof.explain.limits import CLOSE


class Candidate(NamedTuple):
    """A number that a step may form by mistake, in words; the kind of cause that it is and the stage, where known."""

    words: str
    value: float
    kind: str = ""
    stage: int | None = None


def near(one: float | None, other: float | None, noise: float = 0.0) -> bool:
    """Whether two numbers are one, formed in two ways; ``noise`` is a relative error beside that of a sum in fp32."""
    return one is not None and other is not None and abs(one - other) <= max(CLOSE, FP32.least, noise) * abs(other)


def called(value: float, candidates: Iterable[Candidate], noise: float = 0.0) -> Candidate | None:
    """The first of ``candidates`` that ``value`` is; None where it is none of them. All of them are finite."""
    if not math.isfinite(value):
        return Candidate("not finite, though all that it is formed of is", value)
    return next((one for one in candidates if near(value, one.value, noise)), None)


def rounded(right: float) -> list[Candidate]:
    """The ``right`` number in narrower types."""
    whole = torch.tensor(right, dtype=torch.float64)
    return [Candidate(f"the right one, {name}-rounded", whole.to(dtype).item()) for name, dtype in NARROWER.items()]


def multiples(right: float, counts: Iterable[int]) -> list[Candidate]:
    """The ``right`` number times, and divided by, what a step counts."""
    wanted = sorted({count for count in counts if count > 1})
    times = [Candidate(f"{count} times the right one", right * count) for count in wanted]
    return times + [Candidate(f"1/{count} of the right one", right / count) for count in wanted]
