"""A backward that ran, and that gave the input of its stage nothing: its graph does not reach so far."""

from pipeproof.core.cause import Cause
from pipeproof.explain.evidence import Evidence


def cut(evidence: Evidence) -> list[Cause]:
    """The stages with such backwards whose gradients the stages before lack, from the last down."""
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
