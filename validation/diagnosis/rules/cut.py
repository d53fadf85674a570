"""A backward that ran, and that gave the input of its stage nothing: its graph does not reach so far."""

from pipeproof.core.cause import Cause
from pipeproof.diagnosis.evidence import Evidence
from pipeproof.diagnosis.explanation import Explanation
from pipeproof.observers.likeness import Likeness
from pipeproof.pipeline.sizes import first_few

_EMPTY = frozenset({"zero", "missing"})


def cut(evidence: Evidence) -> list[Cause]:
    """The stages with such backwards whose gradients the stages before lack, from the last down."""
    seen = {
        stage: flow.cut
        for stage, flow in evidence.passed.items()
        if flow.cut and stage > 0 and stage - 1 not in evidence.frozen and stage not in evidence.unseen
    }
    found = evidence.attribution if seen else None
    if found is None:
        return []
    causes = []
    for stage in sorted(seen, reverse=True):
        cells = () if found.cells is None else found.cells.rows[stage - 1]
        lost = tuple(m for m in sorted(seen[stage]) if not (cells and cells[m].own))  # else it came another way
        causes += [_cause(evidence, stage, lost, found.stages[stage])] if lost else []
    return causes


def _cause(evidence: Evidence, stage: int, lost: tuple[int, ...], explained: Explanation) -> Cause:
    several = len(lost) > 1
    whose, them = ("their backwards", "them") if several else ("its backward", "it")
    lacking = [one.parameter for one in explained.odd if all(_lacks(one, m) for m in lost)]
    of = f"; {first_few(lacking)} lack{'s' * (len(lacking) == 1)} {them}, too" if lacking else ""
    return Cause(
        "dropped",
        rank=evidence.placement[stage],
        stage=stage,
        microbatches=lost,
        detail=f"{whose} ran, and gave the stage's input no gradient{of}",
        cut=True,
    )


def _lacks(seen: Likeness, microbatch: int) -> bool:
    return seen.kind in _EMPTY or (seen.kind == "counted" and not dict(seen.counts).get(microbatch, 0.0))
