"""Calls of stages: their mode, order and number, and cut graphs."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from pipeproof.core.cause import Cause
from pipeproof.core.observe.observed import UNKNOWN_MICROBATCH
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.rules.passages import complete
from pipeproof.explain.rules.place import cause_of, mismatches_of, order_of
from pipeproof.explain.rules.repeated import find_repeated
from pipeproof.pipeline.action import GIVES_WEIGHT_GRADIENT, Action, Kind


class CallCount(NamedTuple):
    """How often a stage ran forward, or backward, for a microbatch."""

    stage: int
    way: str
    microbatch: int
    times: int


def calls(evidence: Evidence) -> list[Cause]:
    """Causes of a wrong mode, omitted or repeated calls, or exchanged tensors, as sums show best."""
    if found := modes(evidence) or find_repeated(evidence):
        return found
    if _again(evidence, Kind.FORWARD) or not all(flow.complete for flow in evidence.passed.values()):
        return []
    again = _again(evidence, Kind.BACKWARD)
    if again is None:
        return counts(evidence)
    return [replace(one, action=str(again)) if one.stage == again.stage else one for one in complete(evidence)]


def modes(evidence: Evidence) -> list[Cause]:
    """Find modules in the wrong mode; with the calls concerned, if only some calls on a stage."""
    found = [one for one in mismatches_of("microbatches", evidence) if one.what == "mode"]
    if not found:
        return []
    flow = None if found[0].stage is None else evidence.passed.get(found[0].stage)
    called = () if flow is None else flow.called
    wrong = [action for action, training in called if training != found[0].expected]
    cause = cause_of("mode", found, evidence)
    if not 0 < len(wrong) < len(called):
        return [cause]
    return [replace(cause, microbatches=tuple(sorted({one.microbatch for one in wrong})), action=str(wrong[0]))]


def counts(evidence: Evidence) -> list[Cause]:
    """Find microbatches that ran never or twice."""
    found = mismatches_of("microbatches", evidence)
    said = bool(found) and all(
        one.stage in evidence.traced for one in found
    )  # by the step itself: sums may know better
    if said and not any(map(evidence.differs, ("gradient", "presence"))):
        return [cause_of("order", found, evidence)]
    lost = find_cut(evidence)
    ran = [one for one in _not_once(evidence) if not any(_behind(one, cause) for cause in lost)]
    way = "forward" if evidence.operation == "eval" else "backward"
    adding = {(one.stage, one.microbatch) for one in ran if one.way == way}  # a forward that ran twice adds nothing
    again = [one for one in ran if one.times and (one.stage, one.microbatch) in adding]
    kinds = {"dropped": [one for one in ran if not one.times], "doubled": again}
    causes = [*lost, *(_first(evidence, kind, wrong) for kind, wrong in kinds.items() if wrong)]
    return causes or ([cause_of("order", found, evidence)] if found else [])


def _again(evidence: Evidence, kind: Kind) -> Action | None:
    """Find an action that a stage ran twice in place of another microbatch, with the right number of calls.

    Then nothing was omitted: tensors were mistaken for others. A call without a backward does not count.
    """
    every = list(range(evidence.microbatches))
    for stage in evidence.passed:
        ran, backwards = (order_of(evidence, stage, one) for one in (kind, Kind.BACKWARD))
        if UNKNOWN_MICROBATCH not in ran and len(ran) == len(every) and sorted(ran) != every:
            twice = next(m for m in ran if ran.count(m) > 1)
            return Action(stage, kind, twice) if sorted(backwards) in ([], sorted(ran)) else None
    return None


def _not_once(evidence: Evidence) -> Iterator[CallCount]:
    """Count the stages' runs that deviate from once, for stages with mismatches."""
    ran: Counter[tuple[int, str, int]] = Counter()
    for stage, kind, microbatch in evidence.observed.actions(evidence.number):
        if kind is Kind.FORWARD or kind in GIVES_WEIGHT_GRADIENT:
            ran[stage, "forward" if kind is Kind.FORWARD else "backward", microbatch] += 1
    stages = {one.stage for one in mismatches_of("microbatches", evidence) if one.stage is not None} - {
        *evidence.unseen
    }
    for way in ("forward",) if evidence.operation == "eval" else ("forward", "backward"):
        for stage in sorted(stages):
            every = (CallCount(stage, way, m, ran[stage, way, m]) for m in range(evidence.microbatches))
            yield from (one for one in every if one.times != 1)


def _behind(ran: CallCount, cut_off: Cause) -> bool:
    """True for a missing backward that ``cut_off`` left without a gradient."""
    before = cut_off.stage is not None and ran.stage < cut_off.stage
    return (ran.way, ran.times) == ("backward", 0) and before and ran.microbatch in cut_off.microbatches


def _first(evidence: Evidence, kind: str, wrong: Sequence[CallCount]) -> Cause:
    """The first stage concerned, along the flow: forwards go up the stages, backwards down."""
    way, at = wrong[0].way, dict[int, list[CallCount]]()
    for one in wrong:
        if one.way == way:
            at.setdefault(one.stage, []).append(one)
    stage = (min if way == "forward" else max)(at)
    microbatches = tuple(one.microbatch for one in at[stage])
    everywhere = 1 < evidence.stages == sum(tuple(one.microbatch for one in own) == microbatches for own in at.values())
    times = " or ".join(map(str, sorted({one.times for one in at[stage]})))
    several = len(microbatches) > 1
    detail = f"{'their' if several else 'its'} {way}{'s' * several} ran {times} times{' each' * several}"
    flow = evidence.passed.get(stage)
    if (way, times) == ("backward", "0") and flow is not None and all(map(flow.detached.get, microbatches)):
        detail += f"; what stage {stage - 1} made with requires_grad came without it"
    rank = None if everywhere else evidence.placement[stage]
    return Cause(kind, rank, None if everywhere else stage, microbatches, detail=detail)


def find_cut(evidence: Evidence) -> list[Cause]:
    """Stages whose backward ran without a gradient for the stage before, from the last down."""
    causes = []
    for stage in sorted(evidence.passed.keys() - evidence.unseen - {0}, reverse=True):
        ran, found = evidence.passed[stage].cut, evidence.attribution
        if not ran or found is None or stage - 1 in evidence.frozen:
            continue
        cells = () if found.cells is None else found.cells.rows[stage - 1]
        lost = tuple(m for m in sorted(ran) if not (cells and cells[m].own))  # else it came another way
        whose = "their backwards" if len(lost) > 1 else "its backward"
        detail = f"{whose} ran, and gave the stage's input no gradient"
        if lost:
            causes.append(Cause("dropped", evidence.placement[stage], stage, lost, detail=detail, cut=True))
    return causes
