"""The cause that mismatches of one law are, at the ranks and stages of all of them; the order in which a stage ran."""

from collections.abc import Sequence
from dataclasses import replace

from pipeproof.core.cause import Cause
from pipeproof.core.verdict import Mismatch
from pipeproof.explain.evidence import Evidence
from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.sizes import some


def found_of(law: str, evidence: Evidence) -> list[Mismatch]:
    """The mismatches of ``law`` that rounding does not explain."""
    return [one for one in evidence.verdict.mismatches if one.law == law and not one.within]


def cause_of(
    kind: str, found: Sequence[Mismatch], evidence: Evidence, *, detail: str = "", factor: float | None = None
) -> Cause:
    """A cause where all of ``found`` is: on no rank, and at no stage, in particular where all have it."""
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
        detail=detail or compared(found),
        stages=tuple(stages) if 1 < len(stages) < evidence.stages else (),
        ranks=ranks if len(ranks) > 1 else (),
    )


def compared(found: Sequence[Mismatch]) -> str:
    """What the first of ``found`` is and should be, and how many more are wrong."""
    first, more = found[0], len(found) - 1
    name = f"{first.parameter}: " if more and first.parameter is not None else ""
    others = f"; {some(more, 'more place')} {'is' if more == 1 else 'are'} wrong, too" if more else ""
    return f"{name}{first.seen}, expected {first.expected}{others}"


def _ranks(found: Sequence[Mismatch], stages: Sequence[int], evidence: Evidence) -> tuple[int, ...]:
    """The ranks that are wrong; none where all are that hold the ``stages``, or where it is not known.

    Of ranks that hold a stage together, the first is held against the reference and speaks for all; the others are held
    against the first.
    """
    wrong: set[int] = set()
    for one in found:
        if one.rank is None:
            return ()
        first = one.stage is not None and one.rank == evidence.placement[one.stage]
        wrong |= {*evidence.holders(one.stage)} if first and one.stage is not None else {one.rank}
    every = {rank for stage in stages for rank in evidence.holders(stage)}
    return tuple(sorted(wrong)) if len(wrong) == 1 or not wrong >= every else ()


def ordered(evidence: Evidence, stage: int, kind: Kind) -> list[int]:
    """The microbatches of a stage's forwards or backwards, as they ran; empty where it was not watched."""
    flow = evidence.passed.get(stage)
    return [] if flow is None else [action.microbatch for action in flow.actions if action.kind is kind]


def turn_of(evidence: Evidence, action: Action) -> int:
    """How many actions of its kind its stage ran before ``action``."""
    order = ordered(evidence, action.stage, action.kind)
    return order.index(action.microbatch) if action.microbatch in order else len(order)


def or_wrong_message(cause: Cause) -> Cause:
    """``cause``, or a message that already arrived so: who sees the modules alone does not know which."""
    return replace(cause, instead=(replace(cause, kind="wrong-message", detail="or that is how they arrived"),))


def or_zeros(cause: Cause, *, forward: bool) -> Cause:
    """``cause`` of what came in as zeros, or that it was zero when it was sent: nobody watches what is sent."""
    if forward:
        other = replace(cause, kind="wrong-message", detail="or zeros are what was sent")
    else:
        other = replace(cause, kind="dropped", detail="or zeros are what was handed back, as where a graph was cut")
    return replace(cause, instead=(other,))
