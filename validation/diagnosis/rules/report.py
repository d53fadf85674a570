"""The report: losses that ranks say otherwise than the stages computed them."""

from collections.abc import Sequence

from validation.diagnosis.facts import Facts
from validation.judging.cause import Cause
from validation.judging.verdict import Mismatch


def report(evidence: Facts) -> list[Cause]:
    """Losses that are reported otherwise than the stages computed them."""
    found = [m for m in evidence.verdict.mismatches if m.law == "loss"]
    upstream = ("gradient", "presence", "updated-parameters", "buffers")
    if not found or any(map(evidence.differs, upstream)) or not _computed_right(evidence):
        return []
    ranks = {m.rank for m in found}
    alone = len(ranks) == 1 < evidence.ranks
    microbatches = tuple(sorted({m.microbatch for m in found if m.microbatch is not None}))
    factor = _ratio(found)
    detail = f"loss {found[0].seen}, expected {found[0].expected}, although the last stage computed what it should"
    return [
        Cause("report", rank=found[0].rank if alone else None, microbatches=microbatches, factor=factor, detail=detail)
    ]


def _computed_right(evidence: Facts) -> bool:
    """Whether the stages computed the right losses: recorded, or in training, where gradients go by them.

    What an evaluation computed leaves no gradient; but where each microbatch's loss is right, or a multiple as all
    others are, only the report is left to blame.
    """
    if evidence.recording is not None or evidence.operation != "eval":
        return True
    found = [m for m in evidence.verdict.mismatches if m.law == "loss" and m.microbatch is not None]
    return not found or (evidence.microbatches > 1 and _ratio(found) is not None)


def _ratio(found: Sequence[Mismatch]) -> float | None:
    ratios = {None if m.ratio is None else round(m.ratio, 4) for m in found}
    return ratios.pop() if len(ratios) == 1 else None
