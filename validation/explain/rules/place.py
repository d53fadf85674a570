"""Build a cause from a law's mismatches, with ranks and stages; look up a stage's order."""

from collections.abc import Sequence
from dataclasses import replace

from pipeproof.core.cause import Cause
from pipeproof.core.verdict import Mismatch
from pipeproof.explain.evidence import Evidence
from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.sizes import some


def mismatches_of(law: str, evidence: Evidence) -> list[Mismatch]:
    """Return a law's mismatches beyond rounding."""
    return [one for one in evidence.verdict.mismatches if one.law == law and not one.within]


def cause_of(
    kind: str, found: Sequence[Mismatch], evidence: Evidence, *, detail: str = "", factor: float | None = None
) -> Cause:
    """Build a cause at the common place of ``found``: no rank, and no stage, if all have it."""
    stages = sorted({one.stage for one in found if one.stage is not None})
    parameters = {one.parameter for one in found}
    ranks = _ranks(found, stages, evidence)
    single = len(stages) == 1
    alone = single and not ranks and len(evidence.holders(stages[0])) == 1
    return Cause(
        kind,
        rank=ranks[0] if len(ranks) == 1 else found[0].rank if alone else None,
        stage=stages[0] if single else None,
        parameter=found[0].parameter if len(parameters) == 1 else None,
        factor=factor,
        detail=detail or describe_mismatches(found),
        stages=tuple(stages) if 1 < len(stages) < evidence.stages else (),
        ranks=ranks if len(ranks) > 1 else (),
    )


def describe_mismatches(found: Sequence[Mismatch]) -> str:
    """Describe the first of ``found``, observed and expected, and count the rest."""
    first, more = found[0], len(found) - 1
    name = f"{first.parameter}: " if more and first.parameter is not None else ""
    others = f"; {some(more, 'more place')} {'is' if more == 1 else 'are'} wrong, too" if more else ""
    return f"{name}{first.observed_text}, expected {first.expected_text}{others}"


def _ranks(found: Sequence[Mismatch], stages: Sequence[int], evidence: Evidence) -> tuple[int, ...]:
    """Return wrong ranks; none if all holders fail, or if unknown.

    Of ranks that hold a stage together, the first is compared with the reference and speaks for all; the others are
    compared with the first.
    """
    wrong: set[int] = set()
    for one in found:
        if one.rank is None:
            return ()
        first = one.stage is not None and one.rank == evidence.placement[one.stage]
        wrong |= {*evidence.holders(one.stage)} if first and one.stage is not None else {one.rank}
    every = {rank for stage in stages for rank in evidence.holders(stage)}
    return tuple(sorted(wrong)) if len(wrong) == 1 or not wrong >= every else ()


def order_of(evidence: Evidence, stage: int, kind: Kind) -> list[int]:
    """Microbatches of a stage's forwards or backwards, in order; empty if unwatched."""
    flow = evidence.passed.get(stage)
    return [] if flow is None else [action.microbatch for action in flow.actions if action.kind is kind]


def turn_of(evidence: Evidence, action: Action) -> int:
    """Count earlier actions with the same kind and stage."""
    order = order_of(evidence, action.stage, action.kind)
    return order.index(action.microbatch) if action.microbatch in order else len(order)


def or_wrong_message(cause: Cause) -> Cause:
    """``cause``, or a message that arrived wrong: modules alone do not decide."""
    return replace(cause, instead=(replace(cause, kind="wrong-message", detail="or that is how they arrived"),))


def or_zeros(cause: Cause, *, forward: bool) -> Cause:
    """``cause`` for received zeros, or for sent zeros: sends stay unwatched."""
    if forward:
        other = replace(cause, kind="wrong-message", detail="or zeros are what was sent")
    else:
        other = replace(cause, kind="dropped", detail="or zeros are what was handed back, as where a graph was cut")
    return replace(cause, instead=(other,))
