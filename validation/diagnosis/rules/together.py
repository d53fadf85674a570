"""Ranks that have a stage together and worked on other microbatches at the same time: what they add up is nobody's."""

from collections import Counter
from collections.abc import Sequence

from pipeproof.core.cause import Cause, listed
from pipeproof.diagnosis.evidence import Evidence
from pipeproof.diagnosis.rules.repeated import or_wrong_message, ordered
from pipeproof.observers.observed import UNKNOWN_MICROBATCH
from pipeproof.pipeline.action import Kind

Order = tuple[int, ...]  # the microbatches of a stage's forwards


def together(evidence: Evidence) -> list[Cause]:
    """The first stage whose ranks took microbatches in another order than others that have it with them."""
    for stage in range(evidence.stages):
        orders = [tuple(ordered(line, stage, Kind.FORWARD)) for line in evidence.lines]
        if not all(orders) or any(UNKNOWN_MICROBATCH in one for one in orders) or len({*map(len, orders)}) > 1:
            return []
        if len({*orders}) > 1:
            once = stage == 0 or len({frozenset(one) for one in orders}) == 1  # else messages were mixed up
            return [_cause(evidence, stage, orders)] if once and _in_parts(evidence, stage) else []
    return []


def _in_parts(evidence: Evidence, stage: int) -> bool:
    """Whether ranks have parts of the stage's parameters, so that they compute each microbatch together."""
    stages = [] if evidence.members is None else evidence.members.stages
    return any(part.shards for one in stages if one.index == stage for _, part in one.part.members)


def _cause(evidence: Evidence, stage: int, orders: Sequence[Order]) -> Cause:
    times = Counter(orders)
    usual = min(orders, key=lambda one: (-times[one], -len({*one}), one))  # of as many, the one with all, counting up
    line, odd = next((line, one) for line, one in zip(evidence.lines, orders, strict=True) if one != usual)
    other = evidence.lines[orders.index(usual)]
    apart = [k for k, own in enumerate(usual) if odd[k] != own]
    rank, beside = (_rank(one, stage, order[apart[0]]) for one, order in ((line, odd), (other, usual)))
    detail = f"it was called with microbatches {listed(odd)}, and rank {beside}, which has the stage with it, with "
    found = Cause(
        "mispaired" if stage else "swapped-data",
        rank=rank,
        stage=stage,
        microbatches=tuple(sorted({usual[k] for k in apart})),
        detail=f"{detail}{listed(usual)}",
    )
    return or_wrong_message(found) if stage else found


def _rank(line: Evidence, stage: int, microbatch: int) -> int:
    """The rank of ``line`` that a microbatch was on."""
    seen = line.passed[stage].ranks.get(microbatch)
    return line.placement[stage] if seen is None else seen
