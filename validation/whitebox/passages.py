"""The link of a foreign step that watching shows: what passed the boundaries of its stages, and where that broke."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise

from validation.cause import Cause
from validation.diagnosis.address import What
from validation.diagnosis.divergence import Divergence, roots
from validation.diagnosis.rules.boundaries import causes_of
from validation.observed import UNTOLD
from validation.recording import FLOWED, FORWARD_POINTS, GIVEN, HANDED_ON, KEPT, MADE, RECEIVED, Point
from validation.whitebox.step_facts import StepFacts

# What is there in place of the right tensor is the doing of the stage's own rank, if these were right.
_GIVEN_TO: Mapping[str, set[str]] = {MADE: {GIVEN}, KEPT: {GIVEN}, HANDED_ON: {RECEIVED, GIVEN}}
_SAME = 1e-3


def passages(facts: StepFacts) -> list[Cause]:
    """The causes of what was wrong first; none where what is there in its place does not say."""
    if causes := exchanged(facts):
        return causes
    rank = facts.observed.schedule.placement
    found = [Divergence(rank[point.stage], point, action, None, what) for point, action, what in _first(facts)]
    if not found or not _telling(found[0], facts):
        return []
    told = [one for one in found if _telling(one, facts)]
    causes = causes_of(told, facts.microbatches, refine=lambda _: None, compounded=lambda: _by_stage(facts))
    return _of_all_stages(causes, facts) or [_named(cause, facts) for cause in causes]


def _of_all_stages(causes: list[Cause], facts: StepFacts) -> list[Cause]:
    """What final gradients say of a factor, if that is in every stage: then it came to no boundary between two first.

    Coarse types show it late, and as another factor for each microbatch.
    """
    between = [one for one in causes if one.kind in ("scale", "unequal-weights") and one.stage != facts.stages - 1]
    found = facts.attribution if causes and len(between) == len(causes) else None
    if (
        found is None
        or found.unknown
        or [(one.kind, one.stage, one.rank) for one in found.causes] != [("scale", None, None)]
    ):
        return []
    return list(found.causes)


def _named(cause: Cause, facts: StepFacts) -> Cause:
    """``cause`` with the microbatches of calls that are known together alone: those that no other call was about."""
    if UNTOLD not in cause.microbatches or cause.stage is None:
        return cause
    flow = facts.passed[cause.stage]
    others = [number for number in cause.microbatches if number != UNTOLD]
    return replace(cause, microbatches=tuple(sorted([*others, *(flow.lost if flow.complete else ())])))


def exchanged(facts: StepFacts) -> list[Cause]:
    """Stages that were called where another should be: with what another than the one before hands on."""
    found = [(stage, before) for stage in facts.passed if (before := _called_after(facts, stage)) is not None]
    placement = facts.observed.schedule.placement
    ranks = {placement[stage] for stage, _ in found}
    told = ", ".join(f"stage {stage} was called with what stage {before} hands on" for stage, before in found)
    if not found:
        return []
    one = found[0][0] if len(found) == 1 else None
    return [Cause("partition", rank=ranks.pop() if len(ranks) == 1 else None, stage=one, detail=told)]


def _called_after(facts: StepFacts, stage: int) -> int | None:
    """The stage whose output is the one input of ``stage``, if no stage before ends so in the reference."""
    begins = facts.passed[stage].begins
    if stage == 0 or len(begins) != 1:
        return None
    (place,) = begins.values()
    makers = [maker for maker, flow in facts.passed.items() if place in flow.ends.values()]
    if len(makers) != 1 or makers[0] in (stage - 1, stage):
        return None
    due = facts.traced.end(stage - 1)
    return makers[0] if due and place not in due else None


def unexplained_passage(facts: StepFacts) -> tuple[str, ...]:
    """What was wrong first at the boundaries, where that says nothing of how; empty where all is right."""
    rank = facts.observed.schedule.placement
    return tuple(
        f"first seen wrong: rank {rank[point.stage]}, stage {point.stage}, {action}: {point.where} is {what.text}"
        for point, action, what in list(_first(facts))[:1]
    )


def _first(facts: StepFacts) -> Iterator[tuple[Point, str, What]]:
    """What is wrong although all that it was made from is right, along the flow."""
    right: dict[Point, bool] = {}
    wrong: dict[Point, tuple[str, What]] = {}
    for crossing in facts.observed.crossings(0):
        stage, _, microbatch = crossing.action
        # Nothing is received behind the last stage: what flows into it there is the loss's own gradient.
        last = stage == facts.stages - 1 and crossing.where == RECEIVED
        point = Point(stage, microbatch, FLOWED if last else crossing.where)
        right[point] = right.get(point, True) and crossing.same
        if crossing.really is not None:
            wrong.setdefault(point, (crossing.at, crossing.really))
    for point in roots(right, facts.stages):
        if _behind_the_unknown(point, facts):
            continue
        action, really = wrong[point]
        text = f"{really.text}, expected microbatch {point.microbatch}'s" if really.kind == "other" else really.text
        yield point, action, What(really.kind, text, really.factor)


def _behind_the_unknown(point: Point, facts: StepFacts) -> bool:
    """Whether this may be made from what a stage did in a call of which nobody knows that it was the same microbatch's.

    Then it may be a consequence, and is no root that anybody knows of.
    """
    stages = [stage for stage, flow in facts.passed.items() if flow.untold and point.microbatch in flow.lost]
    return any(stage < point.stage or point.where not in FORWARD_POINTS for stage in stages)


def _telling(one: Divergence, facts: StepFacts) -> bool:
    """Whether what a tensor is instead says what happened to it.

    What a stage made is its own doing only where what it was given was seen.
    """
    sources = _GIVEN_TO.get(one.point.where)
    if sources is None:
        return one.what.kind not in ("different", "shape")
    at = one.point.stage, one.point.microbatch
    crossings = facts.observed.crossings(0)
    return sources <= {c.where for c in crossings if (c.action.stage, c.action.microbatch) == at}


def _by_stage(facts: StepFacts) -> str:
    """The factor of what every stage hands on, where these differ from stage to stage; else empty."""
    found: dict[int, float] = {}
    for crossing in facts.observed.crossings(0):
        if crossing.where == HANDED_ON and crossing.really is not None and crossing.really.factor is not None:
            found.setdefault(crossing.action.stage, crossing.really.factor)
    ordered = sorted(found.items(), reverse=True)
    if len(ordered) < 2 or any(abs(b / a - 1) < _SAME for (_, a), (_, b) in pairwise(ordered)):
        return ""
    return ", ".join(f"{factor:.4g} at stage {stage}" for stage, factor in ordered)
