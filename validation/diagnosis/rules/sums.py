"""Sums of gradients: what broke them, and what became of them in the reduction of tied parameters, up to the norm."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from pipeproof.core.cause import Cause
from pipeproof.diagnosis.atoms import Term
from pipeproof.diagnosis.combination import told_within
from pipeproof.diagnosis.evidence import Evidence
from pipeproof.diagnosis.interference import Broken, Sources, changed
from pipeproof.diagnosis.tied import cause_of, shares_of
from pipeproof.diagnosis.what_ifs import draws
from pipeproof.observers.recording import Site, of_stage


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


def reduction(evidence: Evidence) -> list[Cause]:
    """What happened to the gradients between the last backward and the norm."""
    assert evidence.recording is not None, "asked for only where a run was recorded"
    summed, reduced = evidence.recording.summed, evidence.gradients
    if not summed:
        return []
    causes = [cause for copies in evidence.tied if (cause := _tied(evidence, copies, summed, reduced)) is not None]
    found: list[Broken] = []
    for stage in reversed(range(evidence.stages)):
        old, new = of_stage(summed, stage), of_stage(reduced, stage)
        sources = Sources(evidence.earlier(stage), summed, of_stage(evidence.recording.parameters, stage))
        tied = [name for owner, name in evidence.shared if owner == stage]
        found += changed(stage, old, new, "between the last backward and the norm", sources=sources, leaving=tied)
    return causes + causes_of([one for one in found if not mended(one, evidence)], evidence)


def _tied(
    evidence: Evidence,
    copies: Sequence[Site],
    summed: Mapping[Site, Tensor | None],
    reduced: Mapping[Site, Tensor | None],
) -> Cause | None:
    """The first copy of one tied parameter that does not have each stage's share once."""
    shares = {site[0]: share for site in copies if (share := summed.get(site)) is not None}
    parts = {
        (site[0], Term("pair", m, m)): part.cpu()
        for site in copies
        for m, one in enumerate(evidence.expected.contributions)
        if (part := one.gradients.get(site)) is not None
    }
    for site in copies:
        seen = reduced.get(site)
        copy = shares_of(site, seen, shares, parts, 0.0 if seen is None else told_within(seen.dtype))
        whole = len(shares) == len(copies) or bool(copy.absent or copy.lacking)
        if whole and not copy.right:
            told = "no sum of the stages' shares"
            unknown = Cause("extra-term", stage=site[0], parameter=site[1], detail=told)
            one = cause_of(copy, dict(copies)) if copy.explained else unknown
            at = site[0] if one.stage is None else one.stage
            others = ", ".join(f"{name} of stage {stage}" for stage, name in copies if stage != at)
            detail = "; ".join(filter(None, (one.detail, f"tied with {others}")))
            return replace(one, rank=evidence.placement[at], detail=detail)
    return None
