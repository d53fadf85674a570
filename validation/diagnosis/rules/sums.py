"""From broken sums to causes: alike over all stages is one cause, else each is its own."""

from collections.abc import Sequence
from dataclasses import replace

from validation.diagnosis.evidence import Evidence
from validation.diagnosis.interference import Broken
from validation.diagnosis.what_ifs import draws
from validation.judging.cause import Cause


def sums(evidence: Evidence) -> list[Cause]:
    """Additions that are not their microbatch's contribution, and sums that changed between actions."""
    found = [one for one in evidence.broken_sums if not mended(one, evidence)]
    if found and found[0].kind == "computation":
        played = {one.number: one for one in evidence.played}
        if draws(evidence.setup, played, evidence.number, found[0].stage):
            found = [replace(found[0], kind="randomness", detail=f"{found[0].detail}; the stage draws random numbers")]
    return causes_of(found, evidence)


def mended(one: Broken, evidence: Evidence) -> bool:
    """Whether the gradients came right after all: what was only late is no cause of what is wrong in the end.

    Tied parameters do not count: their copies' gradients are made of more than their own stage's sums.
    """
    if evidence.setup.plan[evidence.number] != "train":
        return False
    wrong = {(m.stage, m.parameter) for m in evidence.verdict.mismatches if m.law in ("gradient", "presence")}
    own = {(stage, name) for stage, name in evidence.expected.gradients if stage == one.stage}
    concerned = {(one.stage, name) for name in one.parameters} or own
    judged = concerned - evidence.shared
    return bool(judged) and not judged & wrong


def causes_of(found: Sequence[Broken], evidence: Evidence) -> list[Cause]:
    """``found`` grouped: what happened alike at every stage is at no stage in particular."""
    groups: dict[tuple[str, tuple[int, ...], float | None], list[Broken]] = {}
    for one in found:
        factor = None if one.factor is None else float(f"{one.factor:.3g}")
        groups.setdefault((one.kind, one.microbatches, factor), []).append(one)
    # What concerns whole stages first, then what concerns most parameters.
    ordered = sorted(groups.values(), key=lambda group: (bool(group[0].parameters), -len(group)))
    return [_cause(group, evidence) for group in ordered]


def _cause(group: Sequence[Broken], evidence: Evidence) -> Cause:
    first = group[0]
    stages = {one.stage for one in group}
    everywhere = len(stages) == evidence.stages > 1 and not first.parameters
    names = sorted({name for one in group for name in one.parameters})
    more = f"; {len(names)} parameters: {', '.join(names[:3])}{', ...' * (len(names) > 3)}" if len(names) > 1 else ""
    also = "" if everywhere or len(stages) == 1 else f"; also at stage {', '.join(map(str, sorted(stages)[:-1]))}"
    return Cause(
        first.kind,
        rank=None if everywhere else evidence.placement[first.stage],
        stage=None if everywhere else first.stage,
        microbatches=first.microbatches,
        action=first.action,
        parameter=first.parameters[0] if len(first.parameters) == 1 else None,
        factor=first.factor,
        detail=f"{first.detail}{' at every stage' * everywhere}{more}{also}",
    )
