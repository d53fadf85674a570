"""The norm: is it that of the gradients, and if not, which other number is it?"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from validation.cause import Cause
from validation.diagnosis.evidence import Evidence
from validation.diagnosis.facts import Facts
from validation.diagnosis.rules.update import clip_factor, factors, near
from validation.verdict import Mismatch

Likely = tuple[str, int | None, float]  # a norm in words, the stage that it is about, and its value


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
    others = chain(likely_norms(evidence, rank, reported), _of_case(evidence))
    known = [(text, stage) for text, stage, other in others if near(value, other)]
    text, stage = known[0] if known else ("like nothing known", None)
    used, wanted = factors(evidence), clip_factor(evidence, right)
    sound = bool(used) and wanted < 1 and all(one.near(wanted) for one in used.values())
    kind = "report" if alone or (sound and not known) else "norm"
    detail = f"{value:.6g} in place of {right:.6g}: {text}"
    if stage is not None and not alone:
        rank, alone = evidence.observed.schedule.placement[stage], True
    return [Cause(kind, rank=rank if alone else None, stage=stage, factor=value / right, detail=detail)]


def other_norm(facts: Facts, found: Sequence[Mismatch]) -> list[Cause]:
    """Which other number a reported norm is, of right gradients; ``found`` are its mismatches, on one rank or more."""
    rank, ranks = found[0].rank or 0, {mismatch.rank for mismatch in found}
    reported = [row[facts.number].norm for row in facts.observed.ranks]
    value, right = reported[rank], facts.expected.norm
    alone = len(ranks) < sum(one is not None for one in reported)
    if value is None or not right:
        return []
    likely = [one for one in likely_norms(facts, rank, reported) if near(value, one[2])]
    text, stage, _ = likely[0] if likely else ("like nothing known", None, 0.0)
    detail = f"{value:.6g} in place of {right:.6g}: {text}"
    place = facts.observed.schedule.placement[stage] if stage is not None else rank
    where = place if alone or stage is not None else None
    return [Cause("report" if alone else "norm", rank=where, stage=stage, factor=value / right, detail=detail)]


def likely_norms(evidence: Facts, rank: int, reported: Sequence[float | None]) -> Iterator[Likely]:
    """Other norms of the same gradients that a step may form by mistake, and the stage that the mistake is about."""
    kept = evidence.observed.gradients(evidence.number)
    sizes = {site: float(g.double().norm()) for site, g in kept.items() if g is not None}
    by_stage = {s: _root(size for (of, _), size in sizes.items() if of == s) for s in range(evidence.stages)}
    placement = evidence.observed.schedule.placement
    if len(set(reported)) > 1:  # a norm that all ranks agree on is no rank's own
        own = _root(size for (stage, _), size in sizes.items() if placement[stage] == rank)
        yield f"that of rank {rank}'s gradients alone", None, own
    whole = evidence.expected.norm or 0.0
    for stage, part in ((stage, part) for stage, part in by_stage.items() if part):
        yield f"stage {stage}'s gradients are left out", stage, math.sqrt(max(0.0, whole**2 - part**2))
    for stage, part in by_stage.items():
        yield f"that of stage {stage}'s gradients alone", stage, part
    yield "every copy of a tied parameter is counted", None, _root(sizes.values())
    yield "norms were added, not their squares", None, math.fsum(sizes.values())
    yield "the largest of the parameters' norms", None, max(sizes.values(), default=0.0)
    yield "its square", None, whole**2
    for factor in (evidence.microbatches, evidence.ranks, evidence.stages):
        yield f"{factor} times the right one", None, whole * factor
        yield f"1/{factor} of the right one", None, whole / factor


def _of_case(evidence: Evidence) -> Iterator[Likely]:
    """Those of which only the whole plan tells."""
    right = evidence.expected.norm or 0.0
    yield "that of the clipped gradients", None, right * clip_factor(evidence, right)
    for number in range(evidence.number):
        yield "that of an earlier step", None, evidence.played[number].expected.norm or 0.0


def _root(sizes: Iterable[float]) -> float:
    return math.sqrt(math.fsum(size**2 for size in sizes))
