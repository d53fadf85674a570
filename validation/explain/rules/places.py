"""Place causes: at the mismatches of a law, and on ranks and stages, if several ranks hold the wrong tensors."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from pipeproof.core.cause import Cause, join_numbers
from pipeproof.core.observe.recording import GIVEN, HANDED_ON, KEPT, MADE, RECEIVED
from pipeproof.core.tolerance import error
from pipeproof.core.verdict import Mismatch
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.limits import ALIKE
from pipeproof.explain.members import Place
from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.sizes import some

# These are found on ranks, not in stages.
_OF_RANKS = ("not-reduced", "misplaced", "norm", "report", "clip", "update", "step-skipped")


def name_ranks(ranks: Collection[int]) -> str:
    """Ranks in words."""
    return f"rank{'s' * (len(ranks) > 1)} {join_numbers(sorted(ranks))}"


def stages_of(cause: Cause, evidence: Evidence) -> Sequence[int]:
    """Return the stages that may contain ``cause``."""
    return cause.stages or (range(evidence.stages) if cause.stage is None else (cause.stage,))


def at(cause: Cause, places: Collection[Place], evidence: Evidence) -> Cause:
    """Move ``cause`` to ``places``; to no rank if every rank with these stages fails."""
    ranks, stages = (tuple(sorted({place[k] for place in places})) for k in range(2))
    every = {rank for stage in stages for rank in evidence.holders(stage)}
    whole = cause.stage is None and not cause.stages and len(stages) == evidence.stages
    some = () if whole else stages
    single = len(ranks) == 1 and (len(some) == 1 or len(every) > 1)
    return replace(
        cause,
        rank=ranks[0] if single else None,
        ranks=() if single or {*ranks} >= every else ranks,
        stage=some[0] if len(some) == 1 else None,
        stages=some if len(some) > 1 else (),
    )


def place_cause(cause: Cause, evidence: Evidence) -> Cause:
    """Move ``cause`` to its possible origin, unless the place seems known, or nothing adds to it."""
    beside = evidence.differs("replicas") and cause.action is None and cause.kind not in ("mode", "order")
    if beside or evidence.differs("initial-weights") or cause.kind in _OF_RANKS or evidence.members is None:
        return cause
    stages, wrong, begun = stages_of(cause, evidence), evidence.wrong("gradient", "presence"), set[Place]()
    names = {name for stage, name in wrong if stage in stages and cause.parameter in (None, name)}
    if cause.kind == "stale-gradient" and not cause.microbatches:  # ranks with a nonzero ``.grad`` before the step
        for one in evidence.members.stages:
            numbers = [k for k, name in one.names.items() if name in names]
            begun |= {(rank, one.index) for rank, part in one.part.members if any(k in part.begun for k in numbers)}
    for places in (begun, _with_the_same(cause, names, evidence), _wrong_parts(cause, evidence)):
        if places:
            elsewhere = cause.stage is not None and {cause.stage} != {stage for _, stage in places}
            name = min(names) if elsewhere and len(names) == 1 else cause.parameter  # of other stages it is not all
            return at(replace(cause, parameter=name), places, evidence)
    stage = cause.stage
    known = cause.ranks or (stage is not None and cause.rank not in (None, evidence.placement[stage]))
    if stage is None or known or len(evidence.holders(stage)) < 2:
        return cause
    ran = _ranks_of(cause, stage, evidence)
    return replace(cause, rank=min(ran) if len(ran) == 1 else None)


def _with_the_same(cause: Cause, names: Collection[str], evidence: Evidence) -> set[Place]:
    """Places of copies with the same wrong gradient, if stages share all wrong ``names``: none points to one."""
    members = evidence.members
    known = set() if evidence.right is None else {name for _, name in evidence.right.update.shared}  # each by its share
    if members is None or cause.stage is None or cause.action is not None or not known.isdisjoint(names):
        return set()
    found = set[Place]()
    for name in names:
        every = members.held.get(name, ())
        own = [one.gradient for one in every if one.stage == cause.stage]
        if len({one.stage for one in every}) < 2 or not own:
            return set()
        for one in every:
            gradient, other = one.gradient, own[0]
            if gradient is None or other is None:
                same = gradient is other
            else:
                same = gradient.shape == other.shape and error(gradient.double().cpu(), other.double().cpu()) < ALIKE
            found |= {(one.rank, one.stage)} if same else set()
    return found


def _wrong_parts(cause: Cause, evidence: Evidence) -> set[Place]:
    """Ranks with the first wrong part of a parameter in parts."""
    assert evidence.members is not None, "asked for only where there are members"
    every = [one for one in evidence.members.held.get(cause.parameter or "", ()) if one.stage == cause.stage]
    site = cause.stage, cause.parameter
    wrong = [m.rank for m in evidence.verdict.mismatches if m.law == "gradient" and (m.stage, m.parameter) == site]
    parts = {one.rank: one.where for one in every if one.where is not None}
    first = parts.get(wrong[0]) if wrong and wrong[0] is not None else None
    return {(one.rank, one.stage) for one in every if first is not None and one.where == first}


def _ranks_of(cause: Cause, stage: int, evidence: Evidence) -> set[int]:
    """Return the ranks on ``stage`` that worked on the cause's microbatches; none if a rank stays unknown."""
    assert evidence.members is not None, "asked for only where there are members"
    replicas, flow = evidence.members.replicas, evidence.passed.get(stage)
    about = {*(cause.microbatches or range(evidence.microbatches))}
    # Where it goes wrong earlier on this line through ranks than on any other:
    first = all(_wrong_from(stage, line) > _wrong_from(stage, evidence) for line in evidence.lines[1:])
    if flow is not None and first and all(flow.ranks.get(m) is not None for m in about):
        return {rank for m in about if (rank := flow.ranks[m]) is not None}
    return {rank for rank in evidence.holders(stage) if {*replicas.share(rank)} & about}


def _wrong_from(stage: int, line: Evidence) -> float:
    """Position in the flow through ``stage`` of a line's first wrong or unknown tensor; infinite without one."""
    flow, every = line.passed.get(stage), [*range(line.microbatches)]
    kinds = (Kind.FORWARD,) if stage in line.frozen else (Kind.FORWARD, Kind.BACKWARD)
    if flow is None or any(sorted(order_of(line, stage, kind)) != every for kind in kinds):
        return -1.0
    wrong = {where for where, _ in flow.unplaced} | {one.where for one in flow.crossings if not one.same}
    wheres = (GIVEN, MADE, KEPT, RECEIVED, HANDED_ON)  # as data flows through a stage
    return min((float(k) for k, where in enumerate(wheres) if where in wrong), default=math.inf)


def mismatches_of(law: str, evidence: Evidence, *, unless: Sequence[str] = ()) -> list[Mismatch]:
    """Return a law's mismatches beyond rounding; none if a law of ``unless`` differs, from which they may follow."""
    if any(evidence.differs(other) for other in unless):
        return []
    return [one for one in evidence.verdict.mismatches if one.law == law and not one.within]


def cause_of(kind: str, found: Sequence[Mismatch], evidence: Evidence, *, detail: str = "") -> Cause:
    """Build a cause at the common place of ``found``: no rank, and no stage, if all have it."""
    stages = sorted({one.stage for one in found if one.stage is not None})
    parameters = {one.parameter for one in found}
    ranks = _ranks_in(found, stages, evidence)
    single = len(stages) == 1
    alone = single and not ranks and len(evidence.holders(stages[0])) == 1
    return Cause(
        kind,
        rank=ranks[0] if len(ranks) == 1 else found[0].rank if alone else None,
        stage=stages[0] if single else None,
        parameter=found[0].parameter if len(parameters) == 1 else None,
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


def _ranks_in(found: Sequence[Mismatch], stages: Sequence[int], evidence: Evidence) -> tuple[int, ...]:
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
