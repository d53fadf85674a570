"""What is done with the gradients: the clipping and the update."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pipeproof.core.cause import Cause, listed
from pipeproof.core.limits import FP32, precision_of
from pipeproof.core.tolerance import same_bits
from pipeproof.core.verdict import Mismatch, Size
from pipeproof.diagnosis.evidence import Evidence
from pipeproof.diagnosis.limits import CLOSE, ROUNDINGS
from pipeproof.observers.recording import Site
from pipeproof.pipeline.sizes import some
from pipeproof.reference.step import Recipe
from pipeproof.reference.step import clip_factor as factor_of

_SKIPS = "gradients overflow, so that every rank should skip its step"


class Factor(NamedTuple):
    """What a gradient was multiplied by before the optimizer had it, known up to the relative error ``noise``."""

    value: float
    noise: float

    def near(self, other: float) -> bool:
        """Whether it may be ``other``."""
        return abs(self.value - other) <= max(CLOSE, FP32.least, self.noise) * max(abs(other), abs(self.value))


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
    """Parameters that are not what the right gradients should have made of them; not those that rounding explains."""
    found = [m for m in evidence.verdict.mismatches if m.law == "updated-parameters" and not m.within]
    if not found or any(evidence.differs(law) for law in ("gradient", "presence", "grad-norm")):
        return []
    stages = {m.stage for m in found}
    first = found[0]
    one = len(stages) == 1
    others = len({m.parameter for m in found if m.parameter is not None}) - 1
    of = f"{first.parameter}: " if others > 0 else ""
    more = f"; {some(others, 'more parameter')} {'is' if others == 1 else 'are'} wrong, too" if others > 0 else ""
    more += _alike(evidence) if others > 0 else ""
    more += f"; {_SKIPS}" if evidence.scale is not None and evidence.scale.skips else ""
    ranks = _ranks_of(found, evidence)
    alone = first.rank if one or _is_of_one(found, evidence) else None
    cause = Cause(
        "update",
        rank=alone if not ranks else ranks[0] if len(ranks) == 1 else None,
        stage=first.stage if one else None,
        ranks=ranks if len(ranks) > 1 else (),
        parameter=first.parameter if one and others <= 0 else None,
        detail=f"{of}{first.seen}, expected {first.expected}{more}",
    )
    if apart := _apart(found, evidence):
        told = "what is wrong did not move there" if len(apart) == 1 else f"{_ranks(apart)} do not hold the same"
        cause = replace(cause, rank=None, ranks=apart, detail=f"{told}; {cause.detail}")
    if evidence.scale is not None and (alone_told := _skipped(found, evidence)):
        return [replace(cause, kind="step-skipped", detail=alone_told)]
    # A foreign step that does not clip leaves its gradients as the optimizer had them, and these are right.
    foreign = evidence.members is not None and evidence.max_norm is None
    known = evidence.playable is not None or foreign
    return [cause if known else _or_clip(cause, evidence)]


def _alike(evidence: Evidence) -> str:
    """What one says of weights that all moved as many times too far, as by another learning rate; else nothing."""
    used = list(moved(evidence).values()) if evidence.due is not None else []
    if not used or used[0].value <= 0 or not all(one.near(used[0].value) for one in used):
        return ""
    return f", and all of these moved {used[0].value:.4g} times as far as they should"


def _skipped(found: Sequence[Mismatch], evidence: Evidence) -> str:
    """What one says of ranks that alone skipped their step, or alone took it; nothing where ``found`` is not that.

    All weights of these ranks must tell that, and those of all others must be right.
    """
    ranks = {m.rank for m in found}
    others, placement = set(evidence.placement) - ranks, evidence.placement
    every = {site for site, length in evidence.sizes.items() if length and placement[site[0]] in ranks}
    sizes = [(m.found, m.due) for m in found]
    norms = [(s.norm, d.norm) for s, d in sizes if isinstance(s, Size) and isinstance(d, Size)]
    whole = {(m.stage, m.parameter) for m in found} >= every and len(norms) == len(found)
    several = evidence.members is not None and evidence.members.replicas.count > 1
    if not whole or not others or several or evidence.verdict.law("updated-parameters").note:
        return ""
    if all(seen == 0 and due for seen, due in norms):
        return f"no weight moved, and {_ranks(others)} took {'their' if len(others) > 1 else 'its'} step"
    if evidence.scale is not None and evidence.scale.skips and all(seen and due == 0 for seen, due in norms):
        return f"{_SKIPS}; {_ranks(others)} did"
    return ""


def _ranks(those: Collection[int]) -> str:
    return f"rank{'s' * (len(those) > 1)} {listed(sorted(those))}"


def _is_of_one(found: Sequence[Mismatch], evidence: Evidence) -> bool:
    """Whether one rank alone is wrong: of ranks that hold a stage together, the first may speak for all."""
    held = {rank for m in found for rank in (evidence.holders(m.stage) if m.stage is not None else ())}
    return len({m.rank for m in found}) == 1 and (len(held) == 1 or (evidence.members, evidence.sums) == (None, None))


def _ranks_of(found: Sequence[Mismatch], evidence: Evidence) -> tuple[int, ...]:
    """The ranks that are wrong; none where all with these stages are, or where it is not known of each.

    Of ranks that hold a stage together, the first is held against the reference, and the others against the first.
    """
    ranks = {m.rank for m in found if m.rank is not None}
    stages = {m.stage for m in found if m.stage is not None}
    known = all(m.rank is not None and m.stage is not None for m in found)
    if evidence.members is not None:
        known = known and not any(m.stage is not None and m.rank == evidence.placement[m.stage] for m in found)
    every = {rank for stage in stages for rank in evidence.holders(stage)}
    return tuple(sorted(ranks)) if known and ranks < every else ()


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


def _or_clip(cause: Cause, evidence: Evidence) -> Cause:
    """``cause``, or the clipping, where what the optimizer was given is not known.

    Where its step is linear in that, a factor shows in how far parameters moved, and it is clipping's if clipping comes
    to it. Where it does not, or where they moved as far as they should, which of the two stays open.
    """
    size, most = evidence.expected.norm or 0.0, evidence.max_norm
    if most is not None and (size <= most or most == math.inf):
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
    noise = ROUNDINGS * precision_of(before.dtype).unit * (due.began or 0.0) / due.norm
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
    return one is not None and other is not None and abs(one - other) <= max(CLOSE, FP32.least) * abs(other)


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
            noise = ROUNDINGS * precision_of(due.dtype).unit * float(due.double().norm()) / rate
            found[site] = (factor * gradient.cpu().double() + more, noise)
    return found


def _known(evidence: Evidence, stage: int, factor: Factor) -> str:
    """How clipping comes to multiply a stage by ``factor``, in words; empty if it does not."""
    right, placement = evidence.expected.norm, evidence.placement
    rank = [other for other in range(evidence.stages) if placement[other] == placement[stage]]
    ways = {
        "not clipped": 1.0,
        "clipped twice": clip_factor(evidence, right) ** 2,
        "by its own stage's norm": clip_factor(evidence, _size(evidence.sizes, [stage])),
        "by its own rank's norm": clip_factor(evidence, _size(evidence.sizes, rank)),
    }
    return next((words for words, value in ways.items() if factor.near(value)), "")


def _size(norms: Mapping[Site, float], stages: list[int]) -> float:
    return math.sqrt(math.fsum(norm**2 for (stage, _), norm in norms.items() if stage in stages))
