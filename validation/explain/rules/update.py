"""What is done with the gradients: the clipping and the update."""

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from pipeproof.core.cause import Cause, listed
from pipeproof.core.limits import precision_of
from pipeproof.core.tolerance import same_bits
from pipeproof.core.verdict import Mismatch, Size
from pipeproof.explain.candidates import Candidate, called, near
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.limits import ALIKE, LITTLE, ROUNDINGS
from pipeproof.explain.rules.place import cause_of, found_of
from pipeproof.reference.step import Site
from pipeproof.reference.step import clip_factor as factor_of

_SKIPS = "gradients overflow, so that every rank should skip its step"


class Factor(NamedTuple):
    """How many times as far as it should have a parameter moved; NaN where it went elsewhere. ``noise`` is relative."""

    value: float
    noise: float


def update(evidence: Evidence) -> list[Cause]:
    """Parameters that are not what the right gradients should have made of them.

    Where a step is linear in the gradients, how far parameters moved is what these were multiplied by.
    """
    found = found_of("updated-parameters", evidence)
    if not found or any(map(evidence.differs, ("gradient", "presence", "grad-norm"))):
        return []
    cause = cause_of("update", found, evidence)
    if apart := _apart(found, evidence):
        told = "what is wrong did not move there" if len(apart) == 1 else f"{_ranks(apart)} do not hold the same"
        rank, ranks = (apart[0], ()) if len(apart) == 1 else (None, apart)
        cause = replace(cause, rank=rank, ranks=ranks, detail=f"{told}; {cause.detail}")
    if evidence.scale is not None and (skipped := _skipped(found, evidence)):
        return [replace(cause, kind="step-skipped", detail=skipped)]
    factors = [moved(one, evidence) for one in found]
    coarse = any(one.noise > LITTLE for one in factors)  # so that rounding may have led to any of them
    if not coarse and (words := _clipped(found, factors, evidence)):
        wanted = clip_factor(evidence, evidence.expected.norm)
        detail = f"multiplied by {factors[0].value * wanted:.4g}, expected {wanted:.4g}: {words}"
        return [replace(cause, kind="clip", factor=factors[0].value * wanted, detail=detail)]
    (times, noise), *more = factors
    if more and times and not coarse and all(near(one.value, times, one.noise + noise) for one in more):
        cause = replace(cause, detail=f"{cause.detail}: all moved {times:.4g} times as far as they should")
    clips = all(one.value for one in factors) and _may_be_clipped(evidence, coarse)  # which stops no weight
    return [replace(cause, instead=(replace(cause, kind="clip"),)) if clips else cause]


def _apart(found: Sequence[Mismatch], evidence: Evidence) -> tuple[int, ...]:
    """Of ranks that hold a stage together and have not the same: the one that alone left its weights as they were.

    All of them where nothing tells which of them are right; none where the reference does, or they are not apart.
    """
    wrong = {(m.stage, m.parameter) for m in found if m.beside is not None}
    went: dict[int, bool] = {}
    for site, rank, weight in _left(evidence) if wrong else ():
        if site in wrong and evidence.due is not None:
            went[rank] = went.get(rank, False) or not same_bits(weight, evidence.due.weights[site[1]])
    still = tuple(rank for rank, moved in went.items() if not moved)
    if len(still) == 1 < len(went):
        return still
    known = not evidence.verdict.law("updated-parameters").note
    ranks = {m.rank for m in found} | {m.beside for m in found}
    return () if known or not wrong else tuple(sorted(rank for rank in ranks if rank is not None))


def _left(evidence: Evidence) -> Iterator[tuple[Site, int, Tensor]]:
    """The whole weights that each rank had after the step, of stages that several may hold."""
    for stage in () if evidence.members is None else evidence.members.stages:
        for rank, part in stage.part.members:
            for k, (where, weight) in part.after.items():
                if where is None and k in stage.names:
                    yield (stage.index, stage.names[k]), rank, weight


def clip_factor(evidence: Evidence, size: float | None) -> float:
    """What clipping multiplies by where the norm is ``size``."""
    return 1.0 if evidence.max_norm is None else factor_of(size or 0.0, evidence.max_norm)


def moved(mismatch: Mismatch, evidence: Evidence) -> Factor:
    """How many times as far as it should a parameter moved."""
    seen, due = mismatch.found, mismatch.due
    if not isinstance(seen, Size) or not isinstance(due, Size) or seen.norm is None or not due.norm:
        return Factor(math.nan, 0.0)
    weight = None if evidence.due is None else evidence.due.weights[mismatch.parameter or ""]
    unit = precision_of(evidence.setup.dtype if weight is None else weight.dtype).unit
    noise = ROUNDINGS * unit * (due.began or 0.0) / due.norm
    if not seen.norm:
        return Factor(0.0, noise)
    aside = seen.norm * math.sqrt(max(0.0, 1.0 - (seen.cosine or 0.0) ** 2))
    multiple = aside <= max(ALIKE, noise) * max(seen.norm, due.norm)
    return Factor((seen.factor or 0.0) if multiple else math.nan, noise)


def _clipped(found: Sequence[Mismatch], factors: Sequence[Factor], evidence: Evidence) -> str:
    """How clipping comes to have multiplied gradients so; empty where it does not come to each of ``factors``."""
    if not all(math.isfinite(one.value) for one in factors):
        return ""
    wanted, placement = clip_factor(evidence, evidence.expected.norm), evidence.placement
    ways: dict[str, None] = {}
    for one, factor in zip(found, factors, strict=True):
        own = [] if one.stage is None else [one.stage]
        rank = [stage for stage in range(evidence.stages) if own and placement[stage] == placement[own[0]]]
        norms = {"by its own stage's norm": own, "by its own rank's norm": rank}
        values = {"not clipped": 1.0, "clipped twice": wanted**2}
        values |= {words: clip_factor(evidence, _norm_of(evidence, stages)) for words, stages in norms.items()}
        others = (Candidate(words, value) for words, value in values.items() if not near(value, wanted, ALIKE))
        named = called(factor.value * wanted, others, factor.noise)
        if named is None:
            return ""
        ways[named.words] = None
    return ", ".join(ways)


def _norm_of(evidence: Evidence, stages: Collection[int]) -> float:
    return math.sqrt(math.fsum(size**2 for (stage, _), size in evidence.sizes.items() if stage in stages))


def _may_be_clipped(evidence: Evidence, coarse: bool) -> bool:
    """Whether a wrong update may be clipping that went wrong: our own optimizer shows that, unless it is ``coarse``."""
    own, size, most = evidence.playable is not None, evidence.expected.norm or 0.0, evidence.max_norm
    if most is None:  # of a record, or a chain, nobody knows; a foreign step's gradients are as its optimizer had them
        return not own and (evidence.members is None or evidence.seen is None)
    return most < size and (coarse or not own)


def _skipped(found: Sequence[Mismatch], evidence: Evidence) -> str:
    """What is said of ranks that alone skipped their step, or alone took it; empty where ``found`` is not that.

    All weights of these ranks must tell that, and those of all others must be right.
    """
    ranks, placement = {one.rank for one in found}, evidence.placement
    others = {*placement} - ranks
    every = {site for site, size in evidence.sizes.items() if size and placement[site[0]] in ranks}
    several = evidence.members is not None and evidence.seen is not None and evidence.members.replicas.count > 1
    if not others or several or not {(one.stage, one.parameter) for one in found} >= every:
        return ""
    went = {
        (bool(s.norm), bool(d.norm)) for m in found if isinstance(s := m.found, Size) and isinstance(d := m.due, Size)
    }
    if went == {(False, True)}:
        return f"no weight moved, and {_ranks(others)} took {'their' if len(others) > 1 else 'its'} step"
    if went == {(True, False)} and evidence.scale is not None and evidence.scale.skips:
        return f"{_SKIPS}; {_ranks(others)} did"
    return ""


def _ranks(those: Collection[int]) -> str:
    return f"rank{'s' * (len(those) > 1)} {listed(sorted(those))}"
