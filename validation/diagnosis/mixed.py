"""Parameters whose gradient has some of another parameter's in it: exchanged, summed or averaged with no copy of it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from reference.step import Gradient, Site, Stage
from validation.diagnosis.combination import DECIDED, fit
from validation.diagnosis.explanation import Explanation, limit_of
from validation.diagnosis.update import Update
from validation.judging.cause import Cause

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
