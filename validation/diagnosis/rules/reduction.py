"""The reduction of tied parameters, and whatever else happened between the last backward and the norm."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from validation.diagnosis.atoms import Term
from validation.diagnosis.combination import told_within
from validation.diagnosis.evidence import Evidence, of_stage
from validation.diagnosis.interference import Broken, Sources, changed
from validation.diagnosis.rules.sums import causes_of, mended
from validation.diagnosis.tied import cause_of, shares_of
from validation.judging.cause import Cause
from validation.observers.recording import Site


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
            one = (
                cause_of(copy) if copy.explained else Cause("extra-term", stage=site[0], parameter=site[1], detail=told)
            )
            others = ", ".join(f"{name} of stage {stage}" for stage, name in copies if (stage, name) != site)
            detail = "; ".join(filter(None, (one.detail, f"tied with {others}")))
            return replace(one, rank=evidence.placement[site[0]], detail=detail)
    return None
