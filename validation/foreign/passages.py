"""The link of a foreign step that watching shows: what passed the boundaries of its stages, and where that broke."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from pipeline.action import Kind
from validation.diagnosis.divergence import Divergence
from validation.diagnosis.rules.boundaries import causes_of
from validation.foreign.agreement import informed
from validation.foreign.first_wrong import Boundaries
from validation.foreign.repeated import or_wrong_message, ordered
from validation.foreign.step_facts import StepFacts
from validation.judging.cause import Cause, RuledOut, listed
from validation.observers.observed import UNKNOWN_MICROBATCH
from validation.observers.recording import FLOWED, GIVEN, HANDED_ON, MADE, RECEIVED

_SAME = 1e-3


def passages(facts: StepFacts) -> list[Cause]:
    """The causes of what was wrong first; none where what is there in its place does not say."""
    if causes := exchanged(facts):
        return causes
    boundaries = Boundaries(facts)
    found = list(boundaries.roots())
    if not found or not found[0].telling:
        return []
    if found[0].point.where == FLOWED and boundaries.refined(found[0]) and _attributed(facts):
        return []  # what the gradients are made of says more than that the loss is another
    rank = facts.observed.schedule.placement
    told = {
        Divergence(rank[one.point.stage], one.point, one.crossing.at, None, one.what): one
        for one in found
        if one.telling
    }
    causes = causes_of(
        list(told),
        facts.microbatches,
        refine=lambda one: boundaries.refined(told[one]),
        compounded=lambda: _by_stage(facts),
    )
    if everywhere := _of_all_stages(causes, facts):
        return everywhere
    named = [informed(_named(cause, facts), facts) for cause in causes]
    named = [_with_orders(_with_parameter(cause, facts), facts) for cause in named]
    return [*_beyond(named, facts), *named]


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


def _beyond(causes: Sequence[Cause], facts: StepFacts) -> list[Cause]:
    """The causes at stages nearer to the loss than any of ``causes``, all of which are in backwards and reach none."""
    if not all(cause.action and "B" in cause.action and cause.stage is not None for cause in causes):
        return []
    reached = max(cause.stage or 0 for cause in causes)
    wrong = {m.stage for m in facts.verdict.mismatches if m.law in ("gradient", "presence") and m.stage is not None}
    if not any(stage > reached for stage in wrong):
        return []
    return [cause for cause in _attributed(facts) if cause.stage is not None and cause.stage > reached]


def _attributed(facts: StepFacts) -> Sequence[Cause]:
    """The causes that attribution names."""
    return facts.attribution.causes if facts.attribution is not None else ()


def _with_parameter(cause: Cause, facts: StepFacts) -> Cause:
    """``cause`` of a backward with the one parameter of its stage of whose gradient it is known what happened to it."""
    if cause.kind != "computation" or "B" not in (cause.action or ""):
        return cause
    known = [one for one in _attributed(facts) if one.stage == cause.stage and one.parameter is not None]
    if len(known) != 1:
        return cause
    return replace(cause, parameter=known[0].parameter, detail=f"{cause.detail}; its own gradient: {known[0].kind}")


def _with_orders(cause: Cause, facts: StepFacts) -> Cause:
    """A wrong pairing with the orders in which tensors were made and used.

    Those that were used in the order in which they were made arrived right. Others may as well have come as each other.
    """
    if cause.kind != "mispaired" or cause.stage is None:
        return cause
    backward = "B" in (cause.action or "")
    sender, kind = (cause.stage + 1, Kind.BACKWARD) if backward else (cause.stage - 1, Kind.FORWARD)
    ran = {stage: order for stage in (sender, cause.stage) if (order := ordered(facts, stage, kind))}
    told = ", ".join(f"stage {stage} {listed(order)}" for stage, order in ran.items())
    words = f"order of {'backwards' if backward else 'forwards'}: {told}" if told else ""
    found = replace(cause, detail="; ".join(filter(None, (cause.detail, words))))
    used = _used(facts, cause.stage, RECEIVED if backward else GIVEN, ran.get(cause.stage, []))
    return found if used and used == ran.get(sender) else or_wrong_message(found)


def _used(facts: StepFacts, stage: int, where: str, order: Sequence[int]) -> list[int]:
    """Whose tensors came in at a stage, in the order in which it used them; empty where that is not known of all."""
    found: dict[int, int] = {}
    for one in facts.observed.crossings(0):
        if one.action.stage == stage and one.where == where:
            label = None if one.really is None else one.really.label
            here = label is not None and label.point[::2] == (stage, where)
            found[one.action.microbatch] = label.point.microbatch if label and here else one.action.microbatch
            if not one.same and not here:
                return []
    return [found[m] for m in order] if found.keys() >= set(order) else []


def _named(cause: Cause, facts: StepFacts) -> Cause:
    """``cause`` with the microbatches of calls that are known together alone: those that no other call was about."""
    if UNKNOWN_MICROBATCH not in cause.microbatches or cause.stage is None:
        return cause
    flow = facts.passed[cause.stage]
    others = [number for number in cause.microbatches if number != UNKNOWN_MICROBATCH]
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


def sound(facts: StepFacts) -> RuledOut | None:
    """What the boundaries rule out: of every stage and microbatch something passed each of them, and all was right."""
    judged = [one for one in facts.observed.crossings(0) if one.judged]
    seen = {(one.action.stage, one.action.microbatch, one.where) for one in judged}
    last, every = facts.stages - 1, range(facts.microbatches)
    due = {(stage, m, GIVEN) for stage in range(last + 1) for m in every}
    due |= {(stage, m, where) for stage in range(last) for m in every for where in (MADE, RECEIVED)}
    due |= {(stage, m, HANDED_ON) for stage in range(1, last + 1) for m in every}
    if not seen >= due or not all(one.same for one in judged) or not Boundaries(facts).right:
        return None
    return RuledOut(
        ("wrong-message",), "every tensor at the boundaries of stages is right, to half its digits", len(judged)
    )


def _listed(facts: StepFacts) -> str:
    return ", ".join(f"stage {stage}" for stage in sorted(facts.found.uncalled))


def unexplained_passage(facts: StepFacts) -> tuple[str, ...]:
    """What was wrong first at the boundaries, and what nobody could judge before it; empty where all is right."""
    rank, boundaries = facts.observed.schedule.placement, Boundaries(facts)
    wrong = [
        f"first seen wrong: rank {rank[one.point.stage]}, stage {one.point.stage}, {one.crossing.at}: "
        f"{one.point.where} is {one.what.text}"
        for one in boundaries.roots()
    ]
    unjudged = [
        f"unjudged: rank {rank[point.stage]}, stage {point.stage}: {point.where} is like nothing in the reference"
        for point in boundaries.unjudged
    ]
    return (*wrong[:1], *unjudged[:1])


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
