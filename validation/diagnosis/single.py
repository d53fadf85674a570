"""Causes of single parameters: those that do not follow their stage, are not trained, have copies, or are mixed up."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from reference.step import Gradient, Site, Stage
from validation.diagnosis.combination import DECIDED, fit
from validation.diagnosis.explanation import Explanation, limit_of
from validation.diagnosis.microbatch_weights import ONE, SAME, uniform, weighed
from validation.diagnosis.outlier import Oddity
from validation.diagnosis.tied import Shares
from validation.diagnosis.update import Update
from validation.judging.cause import Cause

WHOLE = {"missing", "unexpected", "rounded", "not-finite"}  # what a whole stage can be at once


def of_parameters(
    update: Update, stages: Sequence[Explanation], sums: Mapping[Stage, Sequence[Cause]]
) -> Iterator[Cause]:
    """The parameters that do not follow their stage."""
    for one in stages:
        if one.compared == 0 and len({oddity.what for oddity in one.odd} & WHOLE) == 1:
            continue  # the stage's own fault
        yield from sums[one.stage]
        groups: dict[Oddity, list[str]] = {}
        for oddity in _telling(one.odd):
            groups.setdefault(replace(oddity, parameter=""), []).append(oddity.parameter)
        for oddity, names in groups.items():
            for cause in _odd_causes(update, oddity, max(ONE, one.limit)):
                more = f"and {', '.join(names[1:])}" if len(names) > 1 else ""
                detail = "; ".join(filter(None, (cause.detail, more)))
                yield replace(cause, stage=one.stage, parameter=names[0], detail=detail)


def _telling(odd: Sequence[Oddity]) -> Sequence[Oddity]:
    """What is known of parameters, but for factors and counts where others are wrong that nobody can explain.

    They may have one cause, such as an overwritten output gradient: a bias shows it as one microbatch in place of
    others, or as some times its own, and a weight, which met it with its own activations, as nothing known.
    """
    alone = all(oddity.what != "unknown" for oddity in odd)
    return [oddity for oddity in odd if alone or oddity.what not in ("counted", "factor")]


def untrained(update: Update) -> Iterator[Cause]:
    """Parameters that are not trained, and have a gradient."""
    for stage in range(update.now.stages):
        trained = update.now.parameters(stage)
        for (owner, name), due in update.expected.items():
            seen = update.observed.get((owner, name))
            if owner == stage and name not in trained and due is None and seen is not None:
                yield Cause("unexpected", stage=stage, parameter=name)


def _odd_causes(update: Update, odd: Oddity, within: float) -> Iterator[Cause]:
    where = (f"{odd.part} of it, all else is right",) if odd.part else ()
    for cause in _of_elements(update, odd, within):
        yield replace(cause, detail="; ".join(filter(None, (*where, cause.detail))))


def _of_elements(update: Update, odd: Oddity, within: float) -> Iterator[Cause]:
    if odd.what in ("missing", "unexpected", "zero", "not-finite", "rounded", "altered", "misplaced"):
        yield Cause(odd.what, detail=odd.note)
    elif odd.what == "shape":
        yield Cause("partition", detail="its gradient has another shape")
    elif odd.what == "factor" and odd.factor is not None:
        fault = uniform(update, odd.factor, within)
        yield Cause(fault.kind, factor=fault.factor, detail=f"{odd.factor:.6g} times" if fault.detail else "")
    elif odd.what == "counted":
        for fault in weighed(update, dict(odd.counts), within):
            yield Cause(fault.kind, microbatches=fault.microbatches, factor=fault.factor, detail=fault.detail)
    elif odd.pairs is not None:
        told = ", ".join(f"{j} with {i}'s" for i, j in odd.pairs.wrong)
        microbatches = tuple(sorted({j for _, j in odd.pairs.wrong}))
        detail = f"its output gradients met activations so: {told}"
        first, *others = (Cause(kind, microbatches=microbatches, detail=detail) for kind in odd.pairs.kinds)
        yield replace(first, instead=tuple(others))


def of_copies(update: Update, tied: Sequence[Shares]) -> Iterator[Cause]:
    """One cause for each tied parameter, with a stage if only one of its copies is wrong."""
    for copies in update.tied:
        wrong = [copy for copy in tied if (copy.stage, copy.parameter) in copies.items() and not copy.right]
        if wrong and wrong[0].apart:
            groups = "; ".join(", ".join(map(str, stages)) for stages in wrong[0].apart)
            detail = f"copies of stages {groups} each have a gradient of their own; all copies together make the sum"
            yield Cause("tied-not-summed", parameter=wrong[0].parameter, detail=detail)
            continue
        causes = [_tied_cause(copy) for copy in wrong if copy.explained]
        if any(cause.kind == "altered" for cause in causes):
            yield next(cause for cause in causes if cause.kind == "altered")
        elif causes and len({cause.kind for cause in causes}) == 1 and len(causes) == len(copies):
            yield replace(causes[0], stage=None, detail="; ".join(map(_held, causes)))
        else:
            yield from causes


def _held(cause: Cause) -> str:
    what = f"{cause.parameter} of stage {cause.stage}"
    return f"{what} has {cause.detail}" if cause.detail else what


def _tied_cause(copy: Shares) -> Cause:
    where = Cause(copy.absent or "tied-not-summed", stage=copy.stage, parameter=copy.parameter)
    counts = list(copy.counts.values())
    if copy.turned is not None:
        return replace(where, kind="altered", stage=copy.turned, detail="its share is in another order")
    if copy.lacking:
        listed = ", ".join(map(str, copy.lacking))
        detail = f"other stages' share of microbatch {listed} is missing"
        return replace(where, microbatches=copy.lacking, detail=detail)
    joint = f"stages {', '.join(map(str, copy.joint))} together"
    names = {stage: joint if stage in copy.joint else f"stage {stage}" for stage in copy.counts}
    detail = ", ".join(f"the share of {names[stage]} {count:g} times" for stage, count in copy.counts.items())
    if copy.absent or (0.0 in counts and set(counts) <= {0.0, 1.0}):
        return replace(where, detail=detail)
    if all(count == round(count) and count >= 1 for count in counts):
        return replace(where, kind="tied-doubled", detail=detail)
    if counts and max(counts) - min(counts) <= SAME * abs(max(counts)):
        return replace(where, kind="scale", factor=counts[0], detail=detail)
    return replace(where, detail=detail)


_NEAR = 0.1  # relative: a sum of the two leaves far less
_NONE = 1e-3  # a part this small is rounding's
_FEW = 2  # numbers that are a sum of any two others

Predicted = Callable[[Site], Gradient]


def mixed(stages: Sequence[Explanation], update: Update) -> Mapping[Stage, tuple[Cause, ...]]:
    """By stage, a cause for each parameter that is a sum of what two parameters of one shape should have."""
    predicted: Predicted = cache(lambda site: stages[site[0]].predicted(site[1]))
    return {one.stage: tuple(_mixed(one, update, predicted)) for one in stages}


def _mixed(one: Explanation, update: Update, predicted: Predicted) -> Iterator[Cause]:
    for odd in one.odd:
        found = _partner((one.stage, odd.parameter), update, predicted) if odd.what == "unknown" else None
        if found is not None:
            yield replace(found, stage=one.stage, parameter=odd.parameter)


def _partner(site: Site, update: Update, predicted: Predicted) -> Cause | None:
    seen, own = update.observed.get(site), predicted(site)
    if seen is None or own is None or own.numel() <= _FEW:
        return None
    limit, target = limit_of(update.expected.get(site), own), seen.double().cpu().flatten()
    for stage, partner, more in _likely(target, own, _others(site, own, update, predicted)):
        made = fit(target, torch.stack([own.flatten(), more.flatten()]), limit)
        there = abs(made.coefficients[1]) > made.uncertain[1]  # what rounding may have put there is no part of it
        if there and made.residual <= limit and max(made.uncertain) <= DECIDED:
            of_own, of_other = made.coefficients
            return _cause(of_own, of_other, f"{partner}, stage {stage}", rounding=max(_NONE, limit))
    return None


def _cause(of_own: float, of_other: float, other: str, *, rounding: float) -> Cause:
    """What it means that a gradient is so much of its own and so much of the other."""
    if abs(of_own) <= rounding * abs(of_other):
        times = "" if abs(of_other - 1) <= rounding else f"{of_other:.4g} times "
        return Cause("misplaced", detail=f"it is {times}the gradient of {other}")
    return Cause("extra-term", detail=f"{of_own:.4g} of its own gradient and {of_other:.4g} of that of {other}")


def _others(site: Site, own: Tensor, update: Update, predicted: Predicted) -> Iterator[tuple[Stage, str, Tensor]]:
    """What all other parameters of one shape should have."""
    for stage in range(update.now.stages):
        for name, parameter in update.now.parameters(stage).items():
            if parameter.shape == own.shape and (stage, name) != site:
                more = predicted((stage, name))
                if more is not None:
                    yield stage, name, more


def _likely(
    target: Tensor, own: Tensor, others: Iterator[tuple[Stage, str, Tensor]]
) -> Iterator[tuple[Stage, str, Tensor]]:
    """Those of ``others`` with which ``own`` leaves little of ``target``; all are looked at in one go."""
    known = list(others)
    if not known:
        return
    base = _unit(own.flatten()[None])
    rest, *rows = (row - (row @ base[0]) * base[0] for row in (target, *(more.flatten() for _, _, more in known)))
    unit = _unit(torch.stack(rows))
    left = (rest - (unit @ rest)[:, None] * unit).norm(dim=1)
    yield from (known[k] for k in (left <= _NEAR * target.norm()).nonzero().flatten().tolist())


def _unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, dim=1, eps=torch.finfo(torch.float64).tiny)
