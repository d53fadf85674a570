"""Wrong numbers: what a step may compute by mistake, a microbatch added again, or the loss scale."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import torch

from pipeproof.core.cause import Cause
from pipeproof.core.limits import FP32
from pipeproof.core.observe.likeness import NARROWER
from pipeproof.core.observe.recording import RECEIVED
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.limits import ALIKE, CLOSE


def tell_apart(cause: Cause, evidence: Evidence) -> Cause:
    """Decide about ``cause`` for repeated microbatches: added again, or multiplied?

    The number of observed backwards decides, and the received gradients. A right loss does not: it may have been
    multiplied after it was reported.
    """
    if cause.kind != "doubled" or not cause.instead or cause.earlier or cause.factor is None:
        return cause
    multiplied = replace(cause.instead[0], detail=cause.detail)
    undivided = cause.factor == evidence.microbatches > 2  # by chance nothing is counted so often
    if undivided and evidence.verdict.law("loss").outcome == "pass":
        return multiplied
    stages = cause.stages or (range(evidence.stages) if cause.stage is None else (cause.stage,))
    crossings = () if evidence.run is None else evidence.run.crossings(evidence.number)
    received = [one for one in crossings if (one.action.stage, one.where) == (max(stages), RECEIVED)]
    factors = {one.action.microbatch: one.really.factor for one in received if one.really is not None}
    came = {microbatch for microbatch, factor in factors.items() if is_near(factor, cause.factor, ALIKE)}
    if came >= {*cause.microbatches}:
        return multiplied
    times = {evidence.backwards(stage).count(m) for stage in stages for m in cause.microbatches}
    if evidence.unseen.isdisjoint(stages) and times == {round(cause.factor)}:
        return replace(cause, instead=())
    if evidence.unseen.isdisjoint(stages) and times == {1} and cause.stage is None and not cause.stages:
        again = replace(cause, instead=(), detail="or what it gave was added once more")
        return replace(multiplied, instead=(again,))
    return cause  # one stage alone may have added it again


def by_loss_scale(cause: Cause, evidence: Evidence) -> Cause:
    """Add a word to ``cause`` for a factor equal to the loss scale, or to a quotient between two scales."""
    scale = None if evidence.scale is None else evidence.scale.of(cause.rank)
    if cause.kind != "scale" or scale is None:
        return cause
    over = f"divided by {scale.divided:g}, where losses were multiplied by {scale.losses:g}"
    left = [Candidate(over, scale.over)]
    for value in (scale.losses, scale.divided):
        left += [Candidate(f"{value:g} is the loss scale", factor) for factor in (value, 1 / value)]
    named = find_candidate(cause.factor or 0.0, (one for one in left if one.value != 1.0), ALIKE)
    return cause if named is None else replace(cause, detail=f"{cause.detail}; {named.words}")


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
