"""What is done with the gradients: the norm, the clipping and the update."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain, combinations
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeproof.diagnosis.evidence import Evidence, of_stage
from pipeproof.judging.cause import Cause
from pipeproof.judging.tolerance import FP32, precision_of
from pipeproof.judging.verdict import Mismatch, Size
from pipeproof.observers.recording import Site
from pipeproof.pipeline.sizes import some
from pipeproof.reference.step import Recipe
from pipeproof.reference.step import clip_factor as factor_of

_ALIKE = 1e-5  # numbers that two ways of forming a norm or a factor may differ by
_ROOM = 16  # roundings


class Factor(NamedTuple):
    """What a gradient was multiplied by before the optimizer had it, known up to the relative error ``noise``."""

    value: float
    noise: float

    def near(self, other: float) -> bool:
        """Whether it may be ``other``."""
        return abs(self.value - other) <= max(_ALIKE, FP32.least, self.noise) * max(abs(other), abs(self.value))


def clip(evidence: Evidence) -> list[Cause]:
    """Gradients that clipping did not multiply by what their norm asks for."""
    if evidence.playable is None:
        return []  # how far parameters moved shows
    used = factors(evidence)
    wanted = clip_factor(evidence, evidence.expected.norm)
    wrong = {site: one for site, one in used.items() if not one.near(wanted)}
    if not wrong or evidence.differs("gradient"):
        return []
    if any(math.isnan(one.value) for one in wrong.values()):
        return _other_gradients(evidence, wrong)
    known = [_known(evidence, stage, one) for (stage, _), one in wrong.items()]
    if evidence.recording is None and not all(known):
        return []  # the optimizer may have done it
    stages = sorted({stage for stage, _ in wrong}, reverse=True)
    several, whole = len(stages) > 1, {site for site in used if site[0] in stages} == set(wrong)
    (stage, name), factor = next((site, one) for site, one in wrong.items() if site[0] == stages[0])
    detail = f"multiplied by {factor.value:.4g}, expected {wanted:.4g}, at stage {', '.join(map(str, stages[::-1]))}"
    return [
        Cause(
            "clip",
            rank=None if several else evidence.placement[stage],
            stage=None if several else stage,
            parameter=None if whole or len(wrong) > 1 else name,
            factor=factor.value,
            detail="; ".join(filter(None, (detail, known[0] if len(set(known)) == 1 else ""))),
        )
    ]


def update(evidence: Evidence) -> list[Cause]:
    """Parameters that are not what the right gradients should have made of them."""
    found = [m for m in evidence.verdict.mismatches if m.law == "updated-parameters"]
    if not found or any(evidence.differs(law) for law in ("gradient", "presence", "grad-norm")):
        return []
    stages = {m.stage for m in found}
    first = found[0]
    one = len(stages) == 1
    others = len({m.parameter for m in found if m.parameter is not None}) - 1
    of = f"{first.parameter}: " if others > 0 else ""
    more = f"; {some(others, 'more parameter')} {'is' if others == 1 else 'are'} wrong, too" if others > 0 else ""
    cause = Cause(
        "update",
        rank=first.rank if one else None,
        stage=first.stage if one else None,
        parameter=first.parameter if one and others <= 0 else None,
        detail=f"{of}{first.seen}, expected {first.expected}{more}",
    )
    # A foreign step that does not clip leaves its gradients as the optimizer had them, and these are right.
    foreign = evidence.members is not None and evidence.max_norm is None
    known = evidence.playable is not None or foreign
    return [cause if known else _or_clip(cause, evidence)]


def _or_clip(cause: Cause, evidence: Evidence) -> Cause:
    """``cause``, or the clipping, where what the optimizer was given is not known.

    Where its step is linear in that, a factor shows in how far parameters moved, and it is clipping's if clipping comes
    to it. Where it does not, or where they moved as far as they should, which of the two stays open.
    """
    size, most = evidence.expected.norm or 0.0, evidence.max_norm
    if most is not None and size <= most:
        return cause
    wanted = clip_factor(evidence, size)
    used = {} if most is None else moved(evidence)
    given = {site: Factor(one.value * wanted, one.noise) for site, one in used.items()}
    words = {_known(evidence, stage, one) for (stage, _), one in given.items()}
    if not words or "" in words or all(one.near(1.0) for one in used.values()):
        return replace(cause, instead=(replace(cause, kind="clip"),))
    first = next(iter(given.values()))
    known = words.pop() if len(words) == 1 else ""
    detail = "; ".join(filter(None, (f"multiplied by {first.value:.4g}, expected {wanted:.4g}", known)))
    return replace(cause, kind="clip", factor=first.value, detail=detail)


def moved(evidence: Evidence) -> Mapping[Site, Factor]:
    """How many times as far as it should have each parameter moved that is not where it should be."""
    assert evidence.due is not None, "asked for only where the run cannot be played again"
    found = [m for m in evidence.verdict.mismatches if m.law == "updated-parameters"]
    return {
        (m.stage or 0, m.parameter): _moved(m, evidence.due.weights[m.parameter])
        for m in found
        if m.parameter is not None
    }


def _moved(mismatch: Mismatch, before: Tensor) -> Factor:
    """How many times as far as it should have a parameter moved; NaN where it went elsewhere."""
    seen, due = mismatch.found, mismatch.due
    if not isinstance(seen, Size) or not isinstance(due, Size) or seen.norm is None or not due.norm:
        return Factor(math.nan, 0.0)
    value, cosine = (0.0, 1.0) if not seen.norm else (seen.factor or 0.0, seen.cosine or 0.0)
    noise = _ROOM * precision_of(before.dtype).unit * (due.began or 0.0) / due.norm
    rest = seen.norm * math.sqrt(max(0.0, 1.0 - cosine**2))
    multiple = rest <= max(1e-3, noise) * max(seen.norm, due.norm)
    return Factor(value if multiple else math.nan, noise)


def factors(evidence: Evidence) -> dict[Site, Factor]:
    """What each gradient was really multiplied by; NaN where what the optimizer had is no multiple of it."""
    kept = evidence.gradients
    found = {}
    for site, (given, noise) in _given(evidence).items():
        before = kept.get(site)
        if before is None or not before.any():
            continue
        one, two = given.flatten().double(), before.flatten().double()
        value = float(one @ two) / float(two @ two)
        size = max(float(one.norm()), abs(value) * float(two.norm()))
        noise += 2 * precision_of(before.dtype).unit * size  # of the product
        multiple = float((one - value * two).norm()) <= 1e-4 * size + noise and size > 0
        found[site] = Factor(value if multiple or not size else math.nan, noise / size if size else 0.0)
    return found


def clip_factor(evidence: Evidence, size: float | None) -> float:
    """What clipping multiplies by where the norm is ``size``."""
    return 1.0 if evidence.max_norm is None else factor_of(size or 0.0, evidence.max_norm)


def learning_rate() -> float:
    """What the optimizer of every case multiplies gradients by."""
    (group,) = Recipe().optimizer([nn.Parameter(torch.zeros(1))]).param_groups
    return float(group["lr"])


def near(one: float | None, other: float | None) -> bool:
    """Whether two numbers are one, formed in two ways."""
    return one is not None and other is not None and abs(one - other) <= max(_ALIKE, FP32.least) * abs(other)


def _other_gradients(evidence: Evidence, wrong: Mapping[Site, Factor]) -> list[Cause]:
    stage, name = next(site for site, one in wrong.items() if math.isnan(one.value))
    detail = "what the optimizer is given are not the gradients that the norm is of"
    rank = evidence.placement[stage]
    return [Cause("update", rank=rank, stage=stage, parameter=name, detail=detail)]


def _given(evidence: Evidence) -> dict[Site, tuple[Tensor, float]]:
    """What the optimizer was given at every site, and the norm of what rounding may have done to that.

    Where it was not recorded, it follows from the update, which is linear in the gradient.
    """
    if evidence.recording is not None:
        return {site: (one, 0.0) for site, one in evidence.recording.clipped.items() if one is not None}
    if evidence.setup.plan[evidence.number] != "train":
        return {}
    factor, rate = clip_factor(evidence, evidence.expected.norm), learning_rate()
    found = {}
    for site, seen in evidence.observed.parameters(evidence.number).items():
        due, gradient = evidence.expected.parameters.get(site), evidence.expected.gradients.get(site)
        if due is not None and gradient is not None:
            more = (due.cpu().double() - seen.double()) / rate
            noise = _ROOM * precision_of(due.dtype).unit * float(due.double().norm()) / rate
            found[site] = (factor * gradient.cpu().double() + more, noise)
    return found


def _known(evidence: Evidence, stage: int, factor: Factor) -> str:
    """How clipping comes to multiply a stage by ``factor``, in words; empty if it does not."""
    right, kept, placement = evidence.expected.norm, evidence.gradients, evidence.placement
    rank = [other for other in range(evidence.stages) if placement[other] == placement[stage]]
    ways = {
        "not clipped": 1.0,
        "clipped twice": clip_factor(evidence, right) ** 2,
        "by its own stage's norm": clip_factor(evidence, _size(kept, [stage])),
        "by its own rank's norm": clip_factor(evidence, _size(kept, rank)),
    }
    return next((words for words, value in ways.items() if factor.near(value)), "")


def _size(gradients: Mapping[Site, Tensor | None], stages: list[int]) -> float:
    own = [g for stage in stages for g in of_stage(gradients, stage).values() if g is not None]
    return math.sqrt(math.fsum(float(g.double().norm()) ** 2 for g in own))


_NOBODYS = "like nothing known"
_FEW = 8  # stages

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
    if evidence.members is not None and not alone and any(not near(one, reporting[0]) for one in reporting[1:]):
        return _apart(found, evidence)
    if value is None or not right:
        detail = f"norm {value}, expected {right}"
        return [] if evidence.playable is None else [Cause("report", rank=rank if alone else None, detail=detail)]
    text, stage = _called(value, chain(likely_norms(evidence, rank), _scaled(value, right)))
    if text == _NOBODYS and not alone and evidence.playable is None:
        return []  # gradients may have been changed after they were compared: see ``of_no_known_norm``
    kind = "report" if alone or (text == _NOBODYS and _clipped_by_the_right(evidence)) else "norm"
    detail = f"{value:.6g} in place of {right:.6g}: {text}"
    if stage is not None and not alone:
        rank, alone = evidence.placement[stage], True
    return [Cause(kind, rank=rank if alone else None, stage=stage, factor=value / right, detail=detail)]


def of_no_known_norm(evidence: Evidence) -> tuple[str, ...]:
    """What is said of a norm that is wrong beside gradients that are right, and of which ``norm`` names no cause."""
    found = [m for m in evidence.verdict.mismatches if m.law == "grad-norm"]
    if not found or evidence.differs("gradient") or evidence.differs("presence"):
        return ()
    return (
        "the norm is like nothing known of the gradients that were compared: it is formed in another way, or gradients "
        "were changed after they were compared and before the norm was formed",
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
        yield f"{factor:g} times the right one", None, right * factor


def _of_several(by_stage: Mapping[int, Mapping[Site, float]]) -> Iterator[Likely]:
    """Those of several stages, where these are few enough for each choice to be looked at."""
    most = len(by_stage) - 2 if len(by_stage) <= _FEW else 0  # of all but one, that one is told
    for count in range(2, most + 1):
        for group in combinations(by_stage, count):
            size = _root(size for stage in group for size in by_stage[stage].values())
            yield f"that of the gradients of stages {', '.join(map(str, group))} alone", None, size


def likely_norms(evidence: Evidence, rank: int) -> Iterator[Likely]:
    """Other norms of the same gradients that a step may form by mistake, and the stage that the mistake is about."""
    kept = {site: g.double() for site, g in evidence.gradients.items() if g is not None}
    sizes = {site: float(g.norm()) for site, g in kept.items()}
    placement = evidence.placement
    by_stage = {s: {site: size for site, size in sizes.items() if site[0] == s} for s in range(evidence.stages)}
    by_rank = {
        r: {site: size for site, size in sizes.items() if placement[site[0]] == r} for r in sorted(set(placement))
    }
    if len(set(evidence.norms)) > 1:  # a norm that all ranks agree on is no rank's own
        yield f"that of rank {rank}'s gradients alone", None, _root(by_rank.get(rank, {}).values())
    whole = evidence.expected.norm or 0.0
    for stage, part in by_stage.items():
        if any(part.values()):
            own = _root(part.values()) ** 2
            yield f"stage {stage}'s gradients are left out", stage, math.sqrt(max(0.0, whole**2 - own))
            yield f"stage {stage}'s gradients are counted twice", stage, math.sqrt(whole**2 + own)
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
