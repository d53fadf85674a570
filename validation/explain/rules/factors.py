"""Of a factor, what it comes from: a microbatch that was added again, or the loss scale that was forgotten."""

from collections.abc import Collection, Iterator
from dataclasses import replace

from pipeproof.core.cause import Cause
from pipeproof.explain.candidates import Candidate, called, near
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.limits import ALIKE
from pipeproof.explain.loss_scale import LossScale
from pipeproof.explain.rules.update import clip_factor
from pipeproof.observers.recording import RECEIVED

_OF_ALL = {"not-unscaled": "scaled-twice", "unscaled-twice": "not-scaled"}  # what gives all gradients the same factor


def told_apart(cause: Cause, evidence: Evidence) -> Cause:
    """``cause`` of microbatches that count several times in sums: were they added again, or multiplied?

    How often backwards were seen to run decides, and what came back. A loss that is right says nothing: it may have
    been multiplied after it was reported.
    """
    if cause.kind != "doubled" or not cause.instead or cause.earlier or cause.factor is None:
        return cause
    multiplied = replace(cause.instead[0], detail=cause.detail)
    undivided = cause.factor == evidence.microbatches > 2  # by chance nothing is counted so often
    if undivided and evidence.verdict.law("loss").outcome == "pass":
        return multiplied
    stages = cause.stages or (range(evidence.stages) if cause.stage is None else (cause.stage,))
    crossings = () if evidence.seen is None else evidence.seen.crossings(evidence.number)
    received = [one for one in crossings if (one.action.stage, one.where) == (max(stages), RECEIVED)]
    factors = {one.action.microbatch: one.really.factor for one in received if one.really is not None}
    came = {microbatch for microbatch, factor in factors.items() if near(factor, cause.factor, ALIKE)}
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
    """``cause`` by its own name where its factor is a matter of the loss scale."""
    scale = evidence.scale
    if cause.kind != "scale" or scale is None:
        return cause
    if cause.action is not None or (cause.stage is None and cause.microbatches):
        return _of_losses(cause, scale, evidence)
    found = of_gradients(cause, scale.of(cause.rank), evidence)
    return _or_of_losses(found, scale, evidence) if found.kind in _OF_ALL else found


def of_gradients(cause: Cause, scale: LossScale, evidence: Evidence) -> Cause:
    """``cause`` by its own name where its factor of all of a rank's gradients is a matter of that rank's ``scale``."""
    if cause.kind != "scale" or cause.parameter is not None:
        return cause
    named = called(cause.factor or 0.0, _candidates(cause, scale, evidence), ALIKE)
    return cause if named is None else replace(cause, kind=named.kind, detail=named.words)


def _of_losses(cause: Cause, scale: LossScale, evidence: Evidence) -> Cause:
    """``cause``, a factor of what flows back from losses, where that is the loss scale once more, or not at all."""
    if cause.stage not in (None, evidence.stages - 1):
        return cause
    words = f"{cause.detail}; {scale.losses:g} is the loss scale"
    ways = [Candidate(words, scale.losses, "scaled-twice"), Candidate(words, 1 / scale.losses, "not-scaled")]
    named = called(cause.factor or 0.0, _or_count(ways, cause, evidence), ALIKE)
    return cause if named is None else replace(cause, kind=named.kind, detail=named.words)


def _candidates(cause: Cause, scale: LossScale, evidence: Evidence) -> Iterator[Candidate]:
    """The factors that the loss scale may leave in gradients, of which ``cause`` is told.

    That a rank's scale is another is seen, and not only inferred from the factor: then it is no count.
    """
    if scale.over != 1.0:
        when = f", and {scale.before:g} when the step began" if scale.before != scale.divided else ""
        told = f"divided by {scale.divided:g}{when}, where losses were multiplied by {scale.losses:g}"
        yield Candidate(told, scale.over, "scales-differ")
    kept = f"{scale.losses:g} times, which is the loss scale"
    twice = f"1/{scale.divided:g} of what they should be, and {scale.divided:g} is the loss scale"
    ways = [
        Candidate(kept, scale.losses, "not-unscaled"),
        Candidate(twice, scale.over / scale.divided, "unscaled-twice"),
    ]
    yield from _or_count(ways, cause, evidence)
    seen, right = [one for one in evidence.norms if one is not None], evidence.expected.norm if evidence.due else None
    if seen and right and all(near(one / right, scale.losses, ALIKE) for one in seen) and scale.losses != 1.0:
        told = f"clipped by a norm of {seen[0]:.6g}, {scale.losses:g} times the right one, which is the loss scale"
        yield Candidate(told, clip_factor(evidence, seen[0]), "unscaled-after-norm")


def _or_count(ways: Collection[Candidate], cause: Cause, evidence: Evidence) -> Iterator[Candidate]:
    """``ways``; where a value is also the number of something that a step divides by, ``cause``, which says both."""
    replicas = 1 if evidence.members is None else evidence.members.replicas.count
    counts = (evidence.microbatches, evidence.ranks, evidence.stages, replicas)
    values = [value for count in counts for value in (float(count), 1 / count)]
    for one in (one for one in ways if one.value != 1.0):
        counted = any(near(one.value, value, ALIKE) for value in values)
        yield Candidate(f"{cause.detail}; that is the loss scale, too", one.value, cause.kind) if counted else one


def _or_of_losses(cause: Cause, scale: LossScale, evidence: Evidence) -> Cause:
    """``cause`` of all gradients, or that losses were scaled otherwise, which gives the same: what flows back tells.

    That tells it also where rounding hides the factor in some stages.
    """
    last, kind = evidence.passed.get(evidence.stages - 1), _OF_ALL[cause.kind]
    flowed = None if cause.earlier or last is None else last.late
    if evidence.flowed_right(range(evidence.stages), cause.factor):
        flowed = 1.0
    if flowed is None:
        everywhere = cause.rank is None and cause.stage is None and not cause.stages
        return replace(cause, instead=(replace(cause, kind=kind),)) if everywhere else cause
    meant = scale.losses**2 if kind == "scaled-twice" else 1.0
    if near(flowed, meant, ALIKE):
        return replace(cause, kind=kind, rank=None, stage=None, stages=())
    return cause
