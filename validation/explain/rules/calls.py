"""Calls of stages: their mode, order and number, and cut graphs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from pipeproof.core.cause import Cause, join_numbers
from pipeproof.core.observe.observed import UNKNOWN_MICROBATCH
from pipeproof.core.observe.recording import GIVEN
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.rules.passages import complete
from pipeproof.explain.rules.places import cause_of, mismatches_of, or_wrong_message, order_of
from pipeproof.pipeline.action import GIVES_WEIGHT_GRADIENT, Action, Kind


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
    said = bool(found) and all(one.stage in evidence.traced for one in found)  # by the step itself: sums know better
    if said and not any(map(evidence.differs, ("gradient", "presence"))):
        return [cause_of("order", found, evidence)]
    lost = find_cut(evidence)
    ran: Counter[tuple[int, str, int]] = Counter()
    for stage, kind, microbatch in evidence.observed.actions(evidence.number):
        if kind is Kind.FORWARD or kind in GIVES_WEIGHT_GRADIENT:
            ran[stage, "forward" if kind is Kind.FORWARD else "backward", microbatch] += 1
    stages = sorted({one.stage for one in found if one.stage is not None} - {*evidence.unseen})
    ways = ("forward",) if evidence.operation == "eval" else ("forward", "backward")
    every = ((way, stage, m) for way in ways for stage in stages for m in range(evidence.microbatches))
    odd = [(way, stage, m, ran[stage, way, m]) for way, stage, m in every if ran[stage, way, m] != 1]
    for cut in lost:  # left the stages before without these backwards
        before = range(cut.stage or 0)
        odd = [
            (way, stage, m, times)
            for way, stage, m, times in odd
            if (way, times) != ("backward", 0) or stage not in before or m not in cut.microbatches
        ]
    adding = {(stage, m) for way, stage, m, _ in odd if way == ways[-1]}  # a forward that ran twice adds nothing
    causes = [*lost]
    for name, wrong in (
        ("dropped", [one for one in odd if not one[3]]),
        ("doubled", [one for one in odd if one[3] and one[1:3] in adding]),
    ):
        if wrong:  # at the first stage concerned, along the flow: forwards go up the stages, backwards down
            way, at = wrong[0][0], dict[int, dict[int, int]]()
            for _, stage, m, times in (one for one in wrong if one[0] == way):
                at.setdefault(stage, {})[m] = times
            causes.append(_cause(evidence, name, way, at))
    return causes or ([cause_of("order", found, evidence)] if found else [])


def _cause(evidence: Evidence, kind: str, way: str, at: Mapping[int, Mapping[int, int]]) -> Cause:
    """``at``: by stage and microbatch, how often its ``way`` ran."""
    stage = (min if way == "forward" else max)(at)
    microbatches = tuple(at[stage])
    everywhere = 1 < evidence.stages == sum(tuple(own) == microbatches for own in at.values())
    times = " or ".join(map(str, sorted({*at[stage].values()})))
    several = len(microbatches) > 1
    detail = f"{'their' if several else 'its'} {way}{'s' * several} ran {times} times{' each' * several}"
    flow = evidence.passed.get(stage)
    if (way, times) == ("backward", "0") and flow is not None and all(map(flow.detached.get, microbatches)):
        detail += f"; what stage {stage - 1} made with requires_grad came without it"
    rank = None if everywhere else evidence.placement[stage]
    return Cause(kind, rank, None if everywhere else stage, microbatches, detail=detail)


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


def find_repeated(evidence: Evidence) -> list[Cause]:
    """Find wrong inputs to the first stage with a microbatch's tensors in another's place, in as many calls.

    If every earlier stage had each microbatch once.
    """
    before: Sequence[int] = range(evidence.microbatches)
    called: dict[int, list[int]] = {stage: [] for stage in range(evidence.stages)}
    for action, _ in evidence.observed.calls(evidence.number) if evidence.passed else ():
        called[action.stage].append(action.microbatch)
    for stage, order in called.items() if evidence.passed else ():
        if UNKNOWN_MICROBATCH in order:
            return []  # the microbatch with another's tensors is unknown
        if stage in evidence.unseen or sorted(order) == sorted(before):
            before = order or before
            continue
        given = _in_place(order, before)
        # The module's tensors identify calls, which a trace numbers differently; no message gives the first its input.
        sure = stage == 0 or sorted(evidence.observed.forwards(evidence.number)[stage]) == sorted(order)
        backwards = order_of(evidence, stage, Kind.BACKWARD)
        if not given or not sure or sorted(backwards) not in ([], sorted(order)):  # a trial has no backward
            return []
        here = [one for one in evidence.observed.crossings(evidence.number) if one.action.stage == stage]
        came = (one for one in here if one.where == GIVEN and one.action.microbatch in given.values())
        if not all(one.same for one in came):  # a few numbers of a tensor match another microbatch's by chance
            return []
        if stage == 0 and (found := complete(evidence)) and _are_counts(found, order, evidence.microbatches):
            ran = f"stage 0 was called with, in this order: {join_numbers(order)}"
            return [replace(cause, detail="; ".join(filter(None, (cause.detail, ran)))) for cause in found]
        text = ", ".join(f"of microbatch {other} in place of {own}" for own, other in sorted(given.items()))
        first = next(iter(given))  # in the order of the stage before
        orders = [f"stage {one}: {join_numbers(called[one])}" for one in (stage - 1, stage) if one >= 0]
        cause = Cause(
            "mispaired" if stage else "swapped-data",
            rank=evidence.placement[stage],
            stage=stage,
            microbatches=tuple(sorted(given)),
            action=f"{stage}F{first}",
            detail=f"its input is that {text} ({stage}F{first}); called with, in this order: {'; '.join(orders)}",
        )
        return [or_wrong_message(cause) if stage else cause]
    return []


def _are_counts(causes: Sequence[Cause], order: Sequence[int], count: int) -> bool:
    """True if microbatches ran with their targets too: gradients show exactly these twice or never."""
    kinds = ("dropped", "doubled")
    gone, again = ({m for one in causes if one.kind == kind for m in one.microbatches} for kind in kinds)
    every = Counter(range(count))
    right = (gone, again) == ({*(every - Counter(order))}, {*(Counter(order) - every)})
    return right and {cause.kind for cause in causes} == {*kinds}


def _in_place(order: Sequence[int], before: Sequence[int]) -> dict[int, int]:
    """Map each missing microbatch to the microbatch in its position; empty without a fit.

    If all came some places late from some position on, and the one before it until then, this covers each from there
    on.
    """
    if len(order) != len(before):
        return {}
    apart = {own: came for own, came in zip(before, order, strict=True) if own != came}
    right = next(k for k, (own, came) in enumerate(zip(before, order, strict=True)) if own != came)
    for late in range(1, len(before)):
        came_late = [before[max(k - late, right - 1)] for k in range(right, len(before))]
        if right and list(order[right:]) == came_late:
            return apart
    missing = [k for k, m in enumerate(before) if m not in order]
    given = {before[k]: order[k] for k in missing}
    spare = Counter(order) - Counter(before)
    return given if Counter(given.values()) == spare else {}
