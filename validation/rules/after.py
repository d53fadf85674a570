"""Links after the last backward: the reduction of tied parameters, the norm, the clipping, the update, the report."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

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
        if seen is not None and _reordered(seen, shares):
            kind, detail = "altered", "the sum of the stages' shares, one of them in another order"
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


def _reordered(seen: Tensor, shares: Sequence[Tensor]) -> bool:
    """Whether ``seen`` is the sum of ``shares`` but for the order of elements of one of them."""
    total = torch.stack(list(shares)).sum(dim=0)
    rests = [(seen.flatten().double() - (total - share), share) for share in shares]
    return any(
        float((rest.sort().values - share.sort().values).norm()) <= 1e-5 * float(share.norm()) for rest, share in rests
    )


def norm(evidence: Evidence) -> list[Cause]:
    """A norm that is not that of the gradients, although these are right."""
    found = [m for m in evidence.verdict.mismatches if m.law == "grad-norm"]
    if not found or evidence.differs("gradient") or evidence.differs("none-ness"):
        return []
    right = evidence.expected.norm
    reported = [rank[evidence.number].norm for rank in evidence.observed.ranks]
    rank = found[0].rank or 0
    value = reported[rank]
    alone = len({m.rank for m in found}) < evidence.case.ranks
    if value is None or not right:
        return [Cause("report", rank=rank if alone else None, detail=f"norm {value}, expected {right}")]
    known = [(text, stage) for text, stage, other in _norms(evidence, rank, reported) if _near(value, other)]
    text, stage = known[0] if known else ("like nothing known", None)
    used, wanted = _factors(evidence), _clip_factor(evidence, right)
    sound = bool(used) and wanted < 1 and all(_near(one, wanted) for one in used.values())
    kind = "report" if alone or (sound and not known) else "norm"
    detail = f"{value:.6g} in place of {right:.6g}: {text}"
    return [Cause(kind, rank=rank if alone else None, stage=stage, factor=value / right, detail=detail)]


def clip(evidence: Evidence) -> list[Cause]:
    """Gradients that clipping did not multiply by what their norm asks for."""
    used = _factors(evidence)
    wanted = _clip_factor(evidence, evidence.expected.norm)
    wrong = {site: one for site, one in used.items() if not _near(one, wanted)}
    if not wrong or evidence.differs("gradient"):
        return []
    if any(one != one for one in wrong.values()):
        stage, name = next(site for site, one in wrong.items() if one != one)
        detail = "what the optimizer is given are not the gradients that the norm is of"
        return [
            Cause(
                "update", rank=evidence.observed.schedule.placement[stage], stage=stage, parameter=name, detail=detail
            )
        ]
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


def _norms(evidence: Evidence, rank: int, reported: Sequence[float | None]) -> Iterator[tuple[str, int | None, float]]:
    """Other norms of the same gradients that a step may form by mistake, and the stage that the mistake is about."""
    kept = evidence.observed.gradients(evidence.number)
    sizes = {site: float(g.double().norm()) for site, g in kept.items() if g is not None}
    by_stage = {s: _root(size for (of, _), size in sizes.items() if of == s) for s in range(evidence.case.stages)}
    placement = evidence.observed.schedule.placement
    if len(set(reported)) > 1:  # a norm that all ranks agree on is no rank's own
        own = _root(size for (stage, _), size in sizes.items() if placement[stage] == rank)
        yield f"that of rank {rank}'s gradients alone", None, own
    whole = evidence.expected.norm or 0.0
    for stage, part in by_stage.items():
        yield f"stage {stage}'s gradients are left out", stage, math.sqrt(max(0.0, whole**2 - part**2))
    for stage, part in by_stage.items():
        yield f"that of stage {stage}'s gradients alone", stage, part
    yield "every copy of a tied parameter is counted", None, _root(sizes.values())
    yield "norms were added, not their squares", None, math.fsum(sizes.values())
    yield "the largest of the parameters' norms", None, max(sizes.values(), default=0.0)
    yield from ((text, None, other) for text, other in _multiples(evidence))


def _multiples(evidence: Evidence) -> Iterator[tuple[str, float]]:
    right = evidence.expected.norm or 0.0
    yield "its square", right**2
    yield "that of the clipped gradients", right * _clip_factor(evidence, right)
    for factor in (evidence.case.microbatches, evidence.case.ranks, evidence.case.stages):
        yield f"{factor} times the right one", right * factor
        yield f"1/{factor} of the right one", right / factor
    for number in range(evidence.number):
        yield "that of an earlier step", evidence.played[number].expected.norm or 0.0


def _root(sizes: Iterable[float]) -> float:
    return math.sqrt(math.fsum(size**2 for size in sizes))


def _factors(evidence: Evidence) -> dict[Site, float]:
    """What each gradient was really multiplied by; NaN where what is left is no multiple of it."""
    kept = evidence.observed.gradients(evidence.number)
    clipped = evidence.recording.clipped if evidence.recording is not None else {}
    found = {}
    for site, after in clipped.items():
        before = kept.get(site)
        if before is not None and after is not None and before.any():
            one = fit(after.flatten().double(), [before.flatten().double()])
            found[site] = one.coefficients[0] if one is not None and one.explains else math.nan
    return found


def _clip_factor(evidence: Evidence, size: float | None) -> float:
    factor = max_norm_of(evidence.case, evidence.number) / ((size or 0.0) + 1e-6)
    return 1.0 if factor > 1.0 else factor


def _near(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and abs(one - other) <= max(_ALIKE, LEAST) * abs(other)
