"""Links after the last backward: the reduction of tied parameters, the norm, the clipping, the update, the report."""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from reference.model import build_model
from validation.cause import Cause
from validation.evidence import Evidence, of_stage
from validation.fit import fit
from validation.observe import max_norm_of
from validation.recording import Site
from validation.rules.sums import causes_of
from validation.stages import tied_across
from validation.sums import Broken, changed
from validation.tolerance import LEAST
from validation.verdict import Mismatch

_COUNT = 1e-3
_ALIKE = 1e-5  # numbers that two ways of forming a norm or a factor may differ by


def reduction(evidence: Evidence) -> list[Cause]:
    """What happened to the gradients between the last backward and the norm."""
    assert evidence.recording is not None, "asked for only where a run was recorded"
    summed, reduced = evidence.recording.summed, evidence.observed.gradients(evidence.number)
    if not summed:
        return []
    model = build_model(evidence.case.model, layers=evidence.case.layers, seed=0)
    tied = [list(copies.items()) for copies in tied_across(model, evidence.case.split)]
    shared = {site for copies in tied for site in copies}
    causes = [cause for copies in tied for cause in _tied(evidence, copies, summed, reduced)]
    found: list[Broken] = []
    for stage in reversed(range(evidence.case.stages)):
        old, new = (
            {k: g for k, g in of_stage(side, stage).items() if (stage, k) not in shared} for side in (summed, reduced)
        )
        found += changed(stage, old, new, "between the last backward and the norm", earlier=evidence.earlier(stage))
    return causes + causes_of(found, evidence)


def _tied(
    evidence: Evidence,
    copies: Sequence[Site],
    summed: Mapping[Site, Tensor | None],
    reduced: Mapping[Site, Tensor | None],
) -> list[Cause]:
    """How often each stage's share is in each copy of one tied parameter; once is right."""
    shares = [share.flatten().double() for site in copies if (share := summed.get(site)) is not None]
    if len(shares) < len(copies):
        return []
    for site in copies:
        seen = reduced.get(site)
        found = None if seen is None else fit(seen.flatten().double(), shares)
        if found is not None and found.explains and all(abs(c - 1) <= _COUNT for c in found.coefficients):
            continue
        kind, detail = "extra-term", "no sum of the stages' shares"
        if seen is None or not seen.any():
            kind, detail = ("missing", "no gradient") if seen is None else ("zero", "zero")
        elif found is not None and found.explains:
            text = ", ".join(
                f"{c:.4g} of stage {stage}'s" for c, (stage, _) in zip(found.coefficients, copies, strict=True)
            )
            missing = any(abs(c) <= _COUNT for c in found.coefficients)
            equal = max(found.coefficients) - min(found.coefficients) <= _COUNT
            kind = "tied-not-summed" if missing else ("scale" if equal else "tied-doubled")
            kind = "tied-doubled" if equal and abs(found.coefficients[0] - len(copies)) <= _COUNT else kind
            detail = f"after the reduction it is {text} share"
        rank = evidence.observed.schedule.placement[site[0]]
        others = ", ".join(f"{name} of stage {stage}" for stage, name in copies if (stage, name) != site)
        return [Cause(kind, rank=rank, stage=site[0], parameter=site[1], detail=f"{detail}; tied with {others}")]
    return []


def norm(evidence: Evidence) -> list[Cause]:
    """A norm that is not that of the gradients, although these are right."""
    found = [m for m in evidence.verdict.mismatches if m.law == "grad-norm"]
    if not found or evidence.differs("gradient") or evidence.differs("none-ness"):
        return []
    ranks = {m.rank for m in found}
    alone = len(ranks) < evidence.case.ranks
    seen = [(m.rank, evidence.observed.ranks[m.rank or 0][evidence.number].norm) for m in found]
    rank, value = seen[0]
    text = next((words for words, other in _norms(evidence, rank or 0) if _near(value, other)), "like nothing known")
    factor = value / evidence.expected.norm if value is not None and evidence.expected.norm else None
    used = _factors(evidence)
    wanted = _clip_factor(evidence, evidence.expected.norm)
    sound = bool(used) and wanted < 1 and all(_near(one, wanted) for one in used.values())
    kind = "report" if alone or sound else "norm"
    detail = f"{value:.6g} in place of {evidence.expected.norm:.6g}: {text}"
    return [Cause(kind, rank=rank if alone else None, factor=factor, detail=detail)]


def clip(evidence: Evidence) -> list[Cause]:
    """Gradients that clipping did not multiply by what their norm asks for."""
    used = _factors(evidence)
    wanted = _clip_factor(evidence, evidence.expected.norm)
    wrong = {site: one for site, one in used.items() if not _near(one, wanted)}
    if not wrong or evidence.differs("gradient"):
        return []
    by_stage = {stage: {one for (s, _), one in wrong.items() if s == stage} for stage, _ in sorted(wrong, reverse=True)}
    stage, factors = next(iter(by_stage.items()))
    whole = all(sum(s == one for s, _ in wrong) == sum(s == one for s, _ in used) for one in by_stage)
    factor = next(iter(factors))
    where = ", ".join(map(str, sorted(by_stage)))
    detail = f"multiplied by {factor:.4g}, expected {wanted:.4g}, at stage {where}"
    several = len(by_stage) > 1
    return [
        Cause(
            "clip",
            rank=None if several else evidence.observed.schedule.placement[stage],
            stage=None if several else stage,
            parameter=None if whole or len(wrong) > 1 else next(iter(wrong))[1],
            factor=factor,
            detail=detail,
        )
    ]


def update(evidence: Evidence) -> list[Cause]:
    """Parameters that are not what the right gradients should have made of them."""
    found = [m for m in evidence.verdict.mismatches if m.law == "updated-parameters"]
    upstream = ("gradient", "none-ness", "grad-norm", "tied-copies")
    if not found or any(evidence.differs(law) for law in upstream):
        return []
    stages = {m.stage for m in found}
    first = found[0]
    detail = f"{first.seen}, expected {first.expected}; {len(found)} parameters"
    one = len(stages) == 1
    parameter = first.parameter if len(found) == 1 else None
    return [
        Cause(
            "update",
            rank=first.rank if one else None,
            stage=first.stage if one else None,
            parameter=parameter,
            detail=detail,
        )
    ]


def report(evidence: Evidence) -> list[Cause]:
    """Losses that are reported otherwise than the stages computed them."""
    found = [m for m in evidence.verdict.mismatches if m.law == "loss"]
    if not found or evidence.recording is None or evidence.differs("gradient"):
        return []
    ranks = {m.rank for m in found}
    alone = len(ranks) == 1 < evidence.case.ranks
    microbatches = tuple(sorted({m.microbatch for m in found if m.microbatch is not None}))
    factor = _ratio(found)
    detail = f"loss {found[0].seen}, expected {found[0].expected}, although the last stage computed what it should"
    return [
        Cause("report", rank=found[0].rank if alone else None, microbatches=microbatches, factor=factor, detail=detail)
    ]


def _ratio(found: Sequence[Mismatch]) -> float | None:
    try:
        ratios = {round(float(m.seen) / float(m.expected), 4) for m in found}
    except (ValueError, ZeroDivisionError):
        return None
    return ratios.pop() if len(ratios) == 1 else None


def _norms(evidence: Evidence, rank: int) -> Iterator[tuple[str, float | None]]:
    """Other norms of the same gradients that a step may form by mistake."""
    kept = evidence.observed.gradients(evidence.number)
    sizes = {site: float(g.double().norm()) for site, g in kept.items() if g is not None}
    own = [size for (stage, _), size in sizes.items() if evidence.observed.schedule.placement[stage] == rank]
    yield "every copy of a tied parameter is counted", math.sqrt(math.fsum(size**2 for size in sizes.values()))
    yield f"that of rank {rank}'s gradients alone", math.sqrt(math.fsum(size**2 for size in own))
    for stage in range(evidence.case.stages):
        part = math.sqrt(math.fsum(size**2 for (s, _), size in sizes.items() if s == stage))
        yield f"that of stage {stage}'s gradients alone", part
    yield "norms were added, not their squares", math.fsum(sizes.values())
    yield "the largest of the parameters' norms", max(sizes.values(), default=None)
    right = evidence.expected.norm
    if right:
        yield "its square", right**2
        yield "that of the clipped gradients", right * _clip_factor(evidence, right)
        for factor in (evidence.case.microbatches, evidence.case.ranks, evidence.case.stages):
            yield f"{factor} times the right one", right * factor
            yield f"1/{factor} of the right one", right / factor
    for number in range(evidence.number):
        if evidence.played[number].expected.norm:
            yield "that of an earlier step", evidence.played[number].expected.norm


def _factors(evidence: Evidence) -> dict[Site, float]:
    """What each gradient was really multiplied by."""
    kept = evidence.observed.gradients(evidence.number)
    clipped = evidence.recording.clipped if evidence.recording is not None else {}
    found = {}
    for site, after in clipped.items():
        before = kept.get(site)
        if before is not None and after is not None and before.any():
            found[site] = (
                float(torch.vdot(after.flatten().double(), before.flatten().double()))
                / float(before.double().norm()) ** 2
            )
    return found


def _clip_factor(evidence: Evidence, size: float | None) -> float:
    factor = max_norm_of(evidence.case.plan, evidence.number) / ((size or 0.0) + 1e-6)
    return 1.0 if factor > 1.0 else factor


def _near(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and abs(one - other) <= max(_ALIKE, LEAST) * abs(other)
