"""The reduction of tied parameters, and whatever else happened between the last backward and the norm."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from validation.diagnosis.combination import counts_of, told_within, whole_within
from validation.diagnosis.evidence import Evidence, of_stage
from validation.diagnosis.interference import Broken, Sources, changed
from validation.diagnosis.rules.sums import causes_of, mended
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
    shares = [share.flatten() for site in copies if (share := summed.get(site)) is not None]
    for site in copies:
        seen = reduced.get(site)
        if seen is None or not seen.any():
            kind, detail = ("missing", "no gradient") if seen is None else ("zero", "zero")
            return _of_copy(evidence, copies, site, kind, detail)
        found = counts_of(seen, shares, told_within(seen.dtype)) if len(shares) == len(copies) else None
        if found is not None:
            if any(abs(c - 1) > whole_within(seen.dtype) for c in found):
                return _of_copy(evidence, copies, site, *_counted(copies, found, whole_within(seen.dtype)))
            continue
        turned = _reordered(seen, shares) if len(shares) == len(copies) else None
        if turned is not None:
            stage = copies[turned][0]
            return _of_copy(evidence, copies, copies[turned], "altered", f"stage {stage}'s share is in another order")
        late = _late(evidence, site, copies, seen)
        if late is not None or len(shares) < len(copies):
            return late
        return _of_copy(evidence, copies, site, "extra-term", "no sum of the stages' shares")
    return None


def _of_copy(evidence: Evidence, copies: Sequence[Site], site: Site, kind: str, detail: str) -> Cause:
    rank = evidence.placement[site[0]]
    others = ", ".join(f"{name} of stage {stage}" for stage, name in copies if (stage, name) != site)
    return Cause(kind, rank=rank, stage=site[0], parameter=site[1], detail=f"{detail}; tied with {others}")


def _counted(copies: Sequence[Site], counts: Sequence[float], room: float) -> tuple[str, str]:
    """What it means that a copy has each stage's share ``counts`` times, not once."""
    text = ", ".join(f"{c:.4g} of stage {stage}'s" for c, (stage, _) in zip(counts, copies, strict=True))
    equal = max(counts) - min(counts) <= room
    if any(abs(c) <= room for c in counts):
        kind = "tied-not-summed"
    elif equal and abs(counts[0] - len(copies)) > room:
        kind = "scale"
    else:
        kind = "tied-doubled"
    return kind, f"after the reduction it is {text} share"


def _late(evidence: Evidence, site: Site, copies: Sequence[Site], seen: Tensor) -> Cause | None:
    """A copy in which some microbatches of another stage's share are missing: they came after the reduction."""
    contributions = evidence.expected.contributions
    known = {
        (copy, m): part
        for copy in copies
        for m, one in enumerate(contributions)
        if (part := one.gradients.get(copy)) is not None
    }
    found = counts_of(seen, list(known.values()), told_within(seen.dtype))
    if found is None:
        return None
    counts = {
        key: round(c) for key, c in zip(known, found, strict=True) if abs(c - round(c)) <= whole_within(seen.dtype)
    }
    missing = [key for key, count in counts.items() if count == 0]
    if len(counts) < len(known) or set(counts.values()) != {0, 1} or any(copy == site for copy, _ in missing):
        return None
    microbatches = tuple(sorted({m for _, m in missing}))
    others = ", ".join(sorted({f"stage {stage}'s" for (stage, _), _ in missing}))
    listed = ", ".join(map(str, microbatches))
    detail = f"{site[1]} of stage {site[0]} lacks {others} share of microbatch {listed}; its own came after the sum"
    return Cause("tied-not-summed", microbatches=microbatches, parameter=site[1], detail=detail)


def _reordered(seen: Tensor, shares: Sequence[Tensor]) -> int | None:
    """The number of the one share whose elements' order is all that tells ``seen`` from the sum of ``shares``."""
    wide = [share.double() for share in shares]
    total = torch.stack(wide).sum(dim=0)
    for number, share in enumerate(wide):
        rest = seen.flatten().double() - (total - share)
        if float((rest.sort().values - share.sort().values).norm()) <= told_within(seen.dtype) / 10 * float(
            share.norm()
        ):
            return number
    return None
