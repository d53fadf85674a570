"""The norm of the gradients: which other number it is, where gradients are right."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, combinations

import torch
from torch import Tensor

from pipeproof.core.cause import Cause
from pipeproof.core.verdict import Mismatch
from pipeproof.diagnosis.evidence import Evidence
from pipeproof.diagnosis.limits import FEW
from pipeproof.diagnosis.rules.update import clip_factor, factors, moved, near
from pipeproof.observers.recording import Site

_NOBODYS = "like nothing known"

Likely = tuple[str, int | None, float]  # a norm in words, the stage that it is about, and its value


def norm(evidence: Evidence) -> list[Cause]:
    """A norm that is not that of the gradients, although these are right, and which other number it is."""
    found = [m for m in evidence.verdict.mismatches if m.law == "grad-norm"]
    if not found or evidence.differs("gradient") or evidence.differs("presence"):
        return []
    told = () if evidence.members is None else evidence.members.found
    if causes := [one.cause for one in told if one.law == "grad-norm"]:
        return causes[:1]
    rank, right = found[0].rank or 0, evidence.expected.norm
    value = evidence.norms[rank]
    reporting = [one for one in evidence.norms if one is not None or evidence.playable]
    alone = len({m.rank for m in found}) < len(reporting)
    if evidence.playable is None and not alone and any(not near(one, reporting[0]) for one in reporting[1:]):
        return _apart(found, evidence)
    if value is None or not right:
        detail = f"norm {value}, expected {right}"
        return [] if evidence.playable is None else [Cause("report", rank=rank if alone else None, detail=detail)]
    text, stage = _called(value, chain(likely_norms(evidence, rank), _scaled(value, right)))
    if text == _NOBODYS and not alone and evidence.playable is None:
        return []  # gradients may have been changed after they were compared: see ``of_no_known_norm``
    kind = "report" if alone or (text == _NOBODYS and _clipped_by_the_right(evidence)) else "norm"
    detail = f"{value:.6g} in place of {right:.6g}: {text}"
    holders = [] if stage is None else evidence.holders(stage)
    if alone:  # a mistake about another rank's stage is made on this one
        cause = Cause(kind, rank, stage if rank in holders else None, factor=value / right, detail=detail)
        return [_used(cause, rank, value, evidence)]
    at = holders[0] if len(holders) == 1 else None
    return [Cause(kind, rank=at, stage=stage, factor=value / right, detail=detail)]


def _used(cause: Cause, rank: int, value: float, evidence: Evidence) -> Cause:
    """``cause`` of a norm that one rank alone reports; where its weights are wrong, too, it was more than a report.

    Of a run of our own it is known what gradients were multiplied by.
    """
    found = [m for m in evidence.verdict.mismatches if m.law == "updated-parameters" and m.rank == rank]
    if not found or evidence.playable is not None:
        return cause
    wrong = {(m.stage, m.parameter) for m in found}
    by, due = clip_factor(evidence, value), clip_factor(evidence, evidence.expected.norm)
    went = [factor for site, factor in moved(evidence).items() if site in wrong] if by != due else []
    if went and all(one.near(by / due) for one in went):
        told = f"{cause.detail}; clipped by it: multiplied by {by:.4g}, expected {due:.4g}"
        return replace(cause, kind="clip", factor=by, detail=told)
    return replace(cause, kind="norm", detail=f"{cause.detail}; weights of this rank are wrong, too")


def of_no_known_norm(evidence: Evidence) -> tuple[str, ...]:
    """What is said of a norm that is wrong beside gradients that are right, and of which ``norm`` names no cause."""
    found = [m for m in evidence.verdict.mismatches if m.law == "grad-norm"]
    if not found or evidence.differs("gradient") or evidence.differs("presence"):
        return ()
    value, right = evidence.norms[found[0].rank or 0], evidence.expected.norm
    times = f"{value / right:.4g} times theirs, " if value and right else ""
    return (
        f"the norm is like nothing known of the gradients that were compared: it is {times}formed in another way, or "
        "gradients were changed after they were compared and before the norm was formed",
    )


def _apart(found: Collection[Mismatch], evidence: Evidence) -> list[Cause]:
    """Of norms that ranks form each for itself, what the first wrong one is; nothing where it is like nothing known."""
    rank = min(one.rank or 0 for one in found)
    value, right = evidence.norms[rank], evidence.expected.norm
    if value is None or not right:
        return []
    text, _ = _called(value, likely_norms(evidence, rank))
    if text == _NOBODYS:
        return []
    detail = f"{value:.6g} in place of {right:.6g}: {text}; ranks report norms of their own"
    return [Cause("norm", rank=rank, factor=value / right, detail=detail)]


def _clipped_by_the_right(evidence: Evidence) -> bool:
    """Whether gradients were clipped as the right norm asks for, so that it was known."""
    if evidence.playable is None:
        return False
    used, wanted = factors(evidence), clip_factor(evidence, evidence.expected.norm)
    return bool(used) and wanted < 1 and all(one.near(wanted) for one in used.values())


def _called(value: float, likely: Iterable[Likely]) -> tuple[str, int | None]:
    """What ``value`` is, in words, and the stage that this is about; several norms may have one value."""
    known = {text: stage for text, stage, other in likely if near(value, other)}
    return " or ".join(list(known)[:2]) or _NOBODYS, next(iter(known.values()), None)


def _scaled(value: float, right: float) -> Iterator[Likely]:
    """A power of two times the right norm, as where the loss was scaled."""
    ratio = value / right
    if ratio > 0 and math.isfinite(ratio):
        factor = 2.0 ** round(math.log2(ratio))
        like = "a loss's scale was still in the gradients" if factor > 1 else "a loss's scale was taken out twice"
        yield f"{factor:g} times the right one, as where {like} when it was formed", None, right * factor


def _of_several(by_stage: Mapping[int, Mapping[Site, float]]) -> Iterator[Likely]:
    """Those of several stages, where these are few enough for each choice to be looked at."""
    most = len(by_stage) - 2 if len(by_stage) <= FEW else 0  # of all but one, that one is told
    for count in range(2, most + 1):
        for group in combinations(by_stage, count):
            size = _root(size for stage in group for size in by_stage[stage].values())
            yield f"that of the gradients of stages {', '.join(map(str, group))} alone", None, size


def likely_norms(evidence: Evidence, rank: int) -> Iterator[Likely]:
    """Other norms of the same gradients that a step may form by mistake, and the stage that the mistake is about."""
    kept = {site: g.double() for site, g in evidence.gradients.items() if g is not None}
    sizes = evidence.sizes
    placement = evidence.placement
    by_stage = {s: {site: size for site, size in sizes.items() if site[0] == s} for s in range(evidence.stages)}
    by_rank = {
        r: {site: size for site, size in sizes.items() if placement[site[0]] == r} for r in sorted(set(placement))
    }
    held = evidence.held(rank) if len(set(evidence.norms)) > 1 else None  # what all ranks agree on is no rank's own
    if held is not None:
        yield (
            f"that of rank {rank}'s gradients alone",
            None,
            _root(size for site, size in sizes.items() if site in held),
        )
    whole = evidence.expected.norm or 0.0
    for stage, part in by_stage.items():
        if any(part.values()):
            own = _root(part.values()) ** 2
            at = stage if len(by_stage) > 1 else None  # of the only one, that is no place
            yield f"stage {stage}'s gradients are left out", at, math.sqrt(max(0.0, whole**2 - own))
            yield f"stage {stage}'s gradients are counted twice", at, math.sqrt(whole**2 + own)
    if len(by_rank) > 1:
        yield "the largest of the ranks' norms", None, max(_root(part.values()) for part in by_rank.values())
    for stage, part in by_stage.items():
        yield f"that of stage {stage}'s gradients alone", stage, _root(part.values())
    yield (
        "every copy of a tied parameter is counted",
        None,
        _root([*sizes.values(), *_of_further_copies(evidence, kept)]),
    )
    yield from _sums_of_norms(sizes.values(), {"ranks": by_rank.values(), "stages": by_stage.values()})
    if kept:
        yield from _other_norms(kept.values())
        flat = _root(size for site, size in sizes.items() if kept[site].dim() < 2)
        yield "parameters of one dimension are left out", None, math.sqrt(max(0.0, whole**2 - flat**2))
    yield "its square", None, whole**2
    for factor in (evidence.microbatches, evidence.ranks, evidence.stages):
        yield f"{factor} times the right one", None, whole * factor
        yield f"1/{factor} of the right one", None, whole / factor
    for count in sorted({evidence.stages, evidence.ranks}):
        yield f"every square is counted {count} times", None, whole * math.sqrt(count)
        yield f"every square is divided by {count}", None, whole / math.sqrt(count)
    yield from _of_several(by_stage)
    if evidence.playable is not None:
        yield from _of_case(evidence)


def _of_further_copies(evidence: Evidence, kept: Mapping[Site, Tensor]) -> Iterator[float]:
    """The norms of copies that other stages hold of what ``kept`` has once, as all that comes from a record has."""
    held = {} if evidence.sums is None else {name: set(stages) for name, stages in evidence.sums.copies}
    for (stage, name), gradient in kept.items():
        for _ in held.get(name, set()) - {stage}:
            yield float(gradient.norm())


def _sums_of_norms(
    sizes: Collection[float], groups: Mapping[str, Collection[Mapping[Site, float]]]
) -> Iterator[Likely]:
    """Norms that were added although their squares should have been: everywhere, or only within or between groups."""
    yield "norms were added, not their squares", None, math.fsum(sizes)
    for name, parts in groups.items():
        yield f"the {name}' norms were added, not their squares", None, math.fsum(_root(one.values()) for one in parts)
        within = _root(math.fsum(one.values()) for one in parts)
        yield f"within {name}, norms were added, not their squares", None, within


def _other_norms(gradients: Collection[Tensor]) -> Iterator[Likely]:
    """Norms of another order, of all gradients as one vector or first of each parameter's."""
    for order, name in ((1.0, "1-norm"), (math.inf, "largest element")):
        each = [float(torch.linalg.vector_norm(gradient, order)) for gradient in gradients if gradient.numel()]
        yield f"the {name}", None, math.fsum(each) if order == 1.0 else max(each, default=0.0)
        yield f"made of every parameter's {name}", None, _root(each)
    yield "the largest of the parameters' norms", None, max((float(g.norm()) for g in gradients), default=0.0)


def _of_case(evidence: Evidence) -> Iterator[Likely]:
    """Those of which only the whole plan tells."""
    right = evidence.expected.norm or 0.0
    yield "that of the clipped gradients", None, right * clip_factor(evidence, right)
    for number in range(evidence.number):
        yield "that of an earlier step", None, evidence.played[number].expected.norm or 0.0


def _root(sizes: Iterable[float]) -> float:
    return math.sqrt(math.fsum(size**2 for size in sizes))
