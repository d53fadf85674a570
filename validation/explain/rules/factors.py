"""Possible origins for a factor: a microbatch added again, or the loss scale."""

from collections.abc import Iterator
from dataclasses import replace

from pipeproof.core.cause import Cause
from pipeproof.core.observe.recording import RECEIVED
from pipeproof.explain.candidates import Candidate, find_candidate, is_near
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.limits import ALIKE
from pipeproof.explain.loss_scale import LossScale


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
    named = find_candidate(cause.factor or 0.0, (one for one in _candidates(scale) if one.value != 1.0), ALIKE)
    return cause if named is None else replace(cause, detail=f"{cause.detail}; {named.words}")


def _candidates(scale: LossScale) -> Iterator[Candidate]:
    """Factors that the loss scale may leave in gradients."""
    yield Candidate(f"divided by {scale.divided:g}, where losses were multiplied by {scale.losses:g}", scale.over)
    for value in (scale.losses, scale.divided):
        yield Candidate(f"{value:g} is the loss scale", value)
        yield Candidate(f"{value:g} is the loss scale", 1 / value)
