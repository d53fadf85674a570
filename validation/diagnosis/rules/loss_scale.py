"""Of a factor, whether it is the loss scale: then one knows what was forgotten, or done twice, and where."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from pipeproof.core.cause import Cause
from pipeproof.diagnosis.evidence import Evidence
from pipeproof.diagnosis.loss_scale import LossScale, is_factor
from pipeproof.diagnosis.rules.update import clip_factor, near

Explains = Callable[[Evidence], Sequence[Cause]]
_OF_ALL = {"not-unscaled": "scaled-twice", "unscaled-twice": "not-scaled"}  # what gives all gradients the same factor


def by_scale(explains: Explains) -> Explains:
    """The same causes, those that are a matter of the loss scale by their own names."""

    def explained(evidence: Evidence) -> Sequence[Cause]:
        causes = explains(evidence)
        return causes if evidence.scale is None else [_of_scale(cause, evidence, evidence.scale) for cause in causes]

    return explained


def _of_scale(cause: Cause, evidence: Evidence, scale: LossScale) -> Cause:
    if cause.kind == "norm" and is_factor(cause.factor, scale.losses):
        told = f"{cause.detail.partition(':')[0]}: {scale.losses:g} times the right one, which is the loss scale"
        return replace(cause, kind="unscaled-after-norm", detail=told)
    if cause.kind != "scale":
        return cause
    if cause.action is not None or (cause.stage is None and cause.microbatches):
        return _of_losses(cause, evidence, scale)
    late = clipped_late(cause, evidence)
    named = (of_gradients(late, each, _counts(evidence)) for each in _as_told(scale, cause.rank))
    return _or_of_losses(next((one for one in named if one != late), late), evidence, scale)


def _as_told(scale: LossScale, rank: int | None) -> Iterator[LossScale]:
    """The scale as ``rank`` has it, where losses have what the last stage's says, or another that some rank says."""
    own = scale.of(rank)
    yield own
    if rank in scale.ranks:
        yield from (replace(own, losses=other) for other in {*scale.ranks.values()} - {own.losses, own.divided})


def of_gradients(cause: Cause, scale: LossScale, counts: Sequence[int]) -> Cause:
    """``cause``, a factor of a rank's gradients, where that is the loss scale; ``counts``: what else it may be.

    That a rank's scale is another is seen, and not only inferred from the factor: then there is nothing else to be.
    """
    if cause.kind != "scale" or cause.parameter is not None:
        return cause
    if is_factor(cause.factor, scale.over):
        when = f", and {scale.before:g} when the step began" if scale.before != scale.divided else ""
        told = f"divided by {scale.divided:g}{when}, where losses were multiplied by {scale.losses:g}"
        return replace(cause, kind="scales-differ", detail=told)
    for kind, factor, told in _forgotten(scale):
        if is_factor(cause.factor, factor):
            return _unless_counted(cause, replace(cause, kind=kind, detail=told), counts)
    return cause


def clipped_late(cause: Cause, evidence: Evidence) -> Cause:
    """``cause``; what clipping makes of gradients by their norm while they are scaled, was clipped too early."""
    scale, told = evidence.scale, [one for one in evidence.norms if one is not None]
    if scale is None or not told or cause.kind != "scale" or not near(cause.factor, clip_factor(evidence, told[0])):
        return cause
    due = evidence.expected.norm
    if not due or not all(is_factor(one / due, scale.losses) for one in told):
        return cause
    detail = f"clipped by a norm of {told[0]:.6g}, {scale.losses:g} times the right one, which is the loss scale"
    return replace(cause, kind="unscaled-after-norm", detail=detail)


def _forgotten(scale: LossScale) -> Iterator[tuple[str, float, str]]:
    yield "not-unscaled", scale.losses, f"{scale.losses:g} times, which is the loss scale"
    twice = f"1/{scale.divided:g} of what they should be, and {scale.divided:g} is the loss scale"
    yield "unscaled-twice", scale.over / scale.divided, twice


def _or_of_losses(cause: Cause, evidence: Evidence, scale: LossScale) -> Cause:
    """``cause`` of all gradients, or that losses were scaled otherwise, which gives the same: what flows back tells.

    That tells it also where rounding hides the factor in some stages.
    """
    other = _OF_ALL.get(cause.kind)
    if other is None:
        return cause
    meant = scale.losses**2 if other == "scaled-twice" else 1.0
    flowed = None if cause.earlier else _flowed(evidence, cause.factor)
    if flowed is None:
        everywhere = cause.rank is None and cause.stage is None and not cause.stages
        return replace(cause, instead=(replace(cause, kind=other),)) if everywhere else cause
    if is_factor(flowed, scale.losses):
        return cause
    of_losses = replace(cause, kind=other, rank=None, stage=None, stages=())
    return of_losses if flowed == meant or is_factor(flowed, meant) else cause


def _flowed(evidence: Evidence, factor: float | None) -> float | None:
    """How many times the reference's what flowed back is; None where that was not seen."""
    if evidence.flowed_right(range(evidence.stages), factor):
        return 1.0
    last = evidence.passed.get(evidence.stages - 1)
    return None if last is None else last.late


def _of_losses(cause: Cause, evidence: Evidence, scale: LossScale) -> Cause:
    """``cause``, a factor of what flows back from losses, where that is the loss scale once more, or not at all."""
    if cause.stage not in (None, evidence.stages - 1):
        return cause
    ways = (("scaled-twice", scale.losses), ("not-scaled", 1 / scale.losses))
    for kind, factor in ways:
        if is_factor(cause.factor, factor):
            told = f"{cause.detail}; {scale.losses:g} is the loss scale"
            return _unless_counted(cause, replace(cause, kind=kind, detail=told), _counts(evidence))
    return cause


def _unless_counted(cause: Cause, named: Cause, counts: Sequence[int]) -> Cause:
    """``named``; but ``cause`` where its factor is also the number of something that a step divides by."""
    factor = cause.factor or 1.0
    if any(is_factor(factor, float(count)) or is_factor(factor, 1.0 / count) for count in counts):
        return replace(cause, detail=f"{cause.detail}; that is the loss scale, too")
    return named


def _counts(evidence: Evidence) -> Sequence[int]:
    replicas = 1 if evidence.members is None else evidence.members.replicas.count
    return evidence.microbatches, evidence.ranks, evidence.stages, replicas
