"""Ranks and stages of a cause, if several ranks hold the wrong tensors."""

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from pipeproof.core.cause import Cause
from pipeproof.core.observe.recording import GIVEN, HANDED_ON, KEPT, MADE, RECEIVED
from pipeproof.core.tolerance import error
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.limits import ALIKE
from pipeproof.explain.members import Place
from pipeproof.explain.rules.place import order_of
from pipeproof.pipeline.action import Kind
from pipeproof.reference.step import Gradient

# These are found on ranks, not in stages.
_OF_RANKS = ("not-reduced", "misplaced", "norm", "report", "clip", "update", "step-skipped")


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
    for places in (_had_before(cause, evidence), _with_the_same(cause, evidence), _wrong_parts(cause, evidence)):
        if places:
            names = _wrong_in(cause, evidence)
            elsewhere = cause.stage is not None and {cause.stage} != {stage for _, stage in places}
            name = min(names) if elsewhere and len(names) == 1 else cause.parameter  # of other stages it is not all
            return at(replace(cause, parameter=name), places, evidence)
    stage = cause.stage
    known = cause.ranks or (stage is not None and cause.rank not in (None, evidence.placement[stage]))
    if stage is None or known or len(evidence.holders(stage)) < 2:
        return cause
    ran = _ranks_of(cause, stage, evidence)
    return replace(cause, rank=min(ran) if len(ran) == 1 else None)


def _had_before(cause: Cause, evidence: Evidence) -> set[Place]:
    """Places with a nonzero ``.grad`` before the step, for a ``cause`` about it."""
    if evidence.members is None or cause.kind != "stale-gradient" or cause.microbatches:
        return set()
    return {place for name in _wrong_in(cause, evidence) for place in evidence.members.places_begun(name)}


def _wrong_in(cause: Cause, evidence: Evidence) -> frozenset[str]:
    """Return parameter names with wrong gradients under ``cause``."""
    stages, wrong = stages_of(cause, evidence), evidence.wrong("gradient", "presence")
    return frozenset(name for stage, name in wrong if stage in stages and cause.parameter in (None, name))


def _with_the_same(cause: Cause, evidence: Evidence) -> set[Place]:
    """Places of copies with the same wrong gradient, if stages share all wrong parameters: none points to one."""
    members, names = evidence.members, _wrong_in(cause, evidence)
    known = set() if evidence.right is None else {name for _, name in evidence.right.update.shared}  # each by its share
    if members is None or cause.stage is None or cause.action is not None or known & names:
        return set()
    found = set[Place]()
    for name in names:
        every = members.held.get(name, ())
        own = [one.gradient for one in every if one.stage == cause.stage]
        if len({one.stage for one in every}) < 2 or not own:
            return set()
        found |= {(one.rank, one.stage) for one in every if _same(one.gradient, own[0])}
    return found


def _same(one: Gradient, other: Gradient) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and error(one.double().cpu(), other.double().cpu()) < ALIKE


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
    if flow is not None and _is_first(stage, evidence) and all(flow.ranks.get(m) is not None for m in about):
        return {rank for m in about if (rank := flow.ranks[m]) is not None}
    return {rank for rank in evidence.holders(stage) if {*replicas.share(rank)} & about}


def _is_first(stage: int, evidence: Evidence) -> bool:
    """True if ``stage`` goes wrong earlier on this line through ranks than on any other."""
    own = _wrong_from(stage, evidence)
    return all(_wrong_from(stage, line) > own for line in evidence.lines[1:])


_WHERES = (GIVEN, MADE, KEPT, RECEIVED, HANDED_ON)  # as data flows through a stage


def _wrong_from(stage: int, line: Evidence) -> float:
    """Position in the flow through ``stage`` of a line's first wrong or unknown tensor; infinite without one."""
    flow, every = line.passed.get(stage), [*range(line.microbatches)]
    kinds = (Kind.FORWARD,) if stage in line.frozen else (Kind.FORWARD, Kind.BACKWARD)
    if flow is None or any(sorted(order_of(line, stage, kind)) != every for kind in kinds):
        return -1.0
    wrong = {where for where, _ in flow.unplaced} | {one.where for one in flow.crossings if not one.same}
    return min((float(k) for k, where in enumerate(_WHERES) if where in wrong), default=math.inf)
