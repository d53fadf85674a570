"""What an operation changes: the clipping and the update, and state that stays behind."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from pipeproof.core.cause import Cause
from pipeproof.core.limits import precision_of
from pipeproof.core.tolerance import same_bits
from pipeproof.core.verdict import Mismatch, Size
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.limits import ALIKE, LITTLE, ROUNDINGS
from pipeproof.explain.rules.factors import Candidate, find_candidate, is_near
from pipeproof.explain.rules.places import cause_of, mismatches_of, name_ranks
from pipeproof.reference.step import clip_factor as factor_of

_SKIPS = "gradients overflow, so that every rank should skip its step"


class Factor(NamedTuple):
    """A parameter's relative movement; NaN in another direction. ``noise`` is relative."""

    value: float
    noise: float


def update(evidence: Evidence) -> list[Cause]:
    """Parameters that differ from the right gradients' update.

    If a step is linear in the gradients, the distance that parameters moved gives the factor on them.
    """
    found = mismatches_of("updated-parameters", evidence)
    if not found or any(map(evidence.differs, ("gradient", "presence", "grad-norm"))):
        return []
    cause = cause_of("update", found, evidence)
    if apart := _ranks_apart(found, evidence):
        words_apart = (
            "what is wrong did not move there" if len(apart) == 1 else f"{name_ranks(apart)} do not hold the same"
        )
        rank, ranks = (apart[0], ()) if len(apart) == 1 else (None, apart)
        cause = replace(cause, rank=rank, ranks=ranks, detail=f"{words_apart}; {cause.detail}")
    if evidence.scale is not None and (skipped := _describe_skips(found, evidence)):
        return [replace(cause, kind="step-skipped", detail=skipped)]
    factors = [update_factor(one, evidence) for one in found]
    coarse = any(one.noise > LITTLE for one in factors)  # so that rounding may have led to any of them
    if not coarse and (words := _describe_clipping(found, factors, evidence)):
        wanted = clip_factor(evidence, evidence.expected.norm)
        detail = f"multiplied by {factors[0].value * wanted:.4g}, expected {wanted:.4g}: {words}"
        return [replace(cause, kind="clip", factor=factors[0].value * wanted, detail=detail)]
    (times, noise), *more = factors
    if more and times and not coarse and all(is_near(one.value, times, one.noise + noise) for one in more):
        cause = replace(cause, detail=f"{cause.detail}: all moved {times:.4g} times as far as they should")
    # Clipping stops no weight. Our own optimizer shows it, unless rounding is coarse; of others it may be unknown, as
    # for a record or a chain, and a foreign step's gradients are its optimizer's.
    own, most = evidence.playable is not None, evidence.max_norm
    clips = most < (evidence.expected.norm or 0.0) and (coarse or not own) if most is not None else False
    if most is None:
        clips = not own and (evidence.members is None or evidence.run is None)
    clips = clips and all(one.value for one in factors)
    return [replace(cause, instead=(replace(cause, kind="clip"),)) if clips else cause]


def _ranks_apart(found: Sequence[Mismatch], evidence: Evidence) -> tuple[int, ...]:
    """Among differing ranks with a common stage, return the only rank with unchanged weights.

    All of them if nothing shows which are right; none if the reference does, or if they agree.
    """
    wrong = {(m.stage, m.parameter) for m in found if m.beside is not None}
    if not wrong:
        return ()
    went: dict[int, bool] = {}
    for stage in () if evidence.members is None or evidence.right is None else evidence.members.stages:
        for rank, part in stage.part.members:
            for k, (where, weight) in part.after.items():
                name = stage.names.get(k)
                if where is None and name is not None and evidence.right is not None and (stage.index, name) in wrong:
                    went[rank] = went.get(rank, False) or not same_bits(weight, evidence.right.weights[name])
    still = tuple(rank for rank, moved in went.items() if not moved)
    if len(still) == 1 < len(went):
        return still
    ranks = {m.rank for m in found} | {m.beside for m in found}
    known = not evidence.verdict.law("updated-parameters").note
    return () if known else tuple(sorted(rank for rank in ranks if rank is not None))


def clip_factor(evidence: Evidence, size: float | None) -> float:
    """The clipping factor for a norm of ``size``."""
    return 1.0 if evidence.max_norm is None else factor_of(size or 0.0, evidence.max_norm)


def update_factor(mismatch: Mismatch, evidence: Evidence) -> Factor:
    """Compute a parameter's relative movement."""
    observed, expected = mismatch.observed, mismatch.expected
    if not isinstance(observed, Size) or not isinstance(expected, Size) or observed.norm is None or not expected.norm:
        return Factor(math.nan, 0.0)
    weight = None if evidence.right is None else evidence.right.weights[mismatch.parameter or ""]
    unit = precision_of(evidence.setup.dtype if weight is None else weight.dtype).unit
    noise = ROUNDINGS * unit * (expected.began or 0.0) / expected.norm
    if not observed.norm:
        return Factor(0.0, noise)
    aside = observed.norm * math.sqrt(max(0.0, 1.0 - (observed.cosine or 0.0) ** 2))
    multiple = aside <= max(ALIKE, noise) * max(observed.norm, expected.norm)
    return Factor((observed.factor or 0.0) if multiple else math.nan, noise)


def _describe_clipping(found: Sequence[Mismatch], factors: Sequence[Factor], evidence: Evidence) -> str:
    """Explain all ``factors`` by clipping faults; empty if any lacks a match."""
    if not all(math.isfinite(one.value) for one in factors):
        return ""
    wanted, placement = clip_factor(evidence, evidence.expected.norm), evidence.placement
    ways: dict[str, None] = {}
    for one, factor in zip(found, factors, strict=True):
        own = [] if one.stage is None else [one.stage]
        rank = [stage for stage in range(evidence.stages) if own and placement[stage] == placement[own[0]]]
        values = {"not clipped": 1.0, "clipped twice": wanted**2}
        for words, stages in (("by its own stage's norm", own), ("by its own rank's norm", rank)):
            norm = math.sqrt(math.fsum(size**2 for (stage, _), size in evidence.sizes.items() if stage in stages))
            values[words] = clip_factor(evidence, norm)
        others = (Candidate(words, value) for words, value in values.items() if not is_near(value, wanted, ALIKE))
        named = find_candidate(factor.value * wanted, others, factor.noise)
        if named is None:
            return ""
        ways[named.words] = None
    return ", ".join(ways)


def _describe_skips(found: Sequence[Mismatch], evidence: Evidence) -> str:
    """Describe ranks that alone skipped, or alone took, their step; empty if ``found`` does not fit.

    All weights of these ranks must show it, and all others' must be right.
    """
    ranks, placement = {one.rank for one in found}, evidence.placement
    others = {*placement} - ranks
    every = {site for site, size in evidence.sizes.items() if size and placement[site[0]] in ranks}
    several = evidence.members is not None and evidence.run is not None and evidence.members.replicas.count > 1
    if not others or several or not {(one.stage, one.parameter) for one in found} >= every:
        return ""
    went = {
        (bool(s.norm), bool(d.norm))
        for m in found
        if isinstance(s := m.observed, Size) and isinstance(d := m.expected, Size)
    }
    if went == {(False, True)}:
        return f"no weight moved, and {name_ranks(others)} took {'their' if len(others) > 1 else 'its'} step"
    if went == {(True, False)} and evidence.scale is not None and evidence.scale.skips:
        return f"{_SKIPS}; {name_ranks(others)} did"
    return ""


def no_update(evidence: Evidence) -> list[Cause]:
    """State that an operation without an update changed: weights, or in an evaluation gradients."""
    kinds = {} if evidence.operation == "train" else {"updated-parameters": "update"}
    if evidence.operation == "eval":
        kinds["presence"] = "unexpected"
    return [cause_of(kind, found, evidence) for law, kind in kinds.items() if (found := mismatches_of(law, evidence))]


def buffers(evidence: Evidence) -> list[Cause]:
    """State left behind by forwards."""
    found = mismatches_of("buffers", evidence)
    return [cause_of("buffers", found, evidence)] if found else []
