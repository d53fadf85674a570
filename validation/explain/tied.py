"""Copies by tied parameter: how often each stage's share counts in each gradient."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeproof.core.cause import Cause
from pipeproof.core.tolerance import error, same_bits
from pipeproof.explain.atoms import Update
from pipeproof.explain.explanation import Explanation
from pipeproof.explain.limits import ALIKE
from pipeproof.explain.reordering import is_reordered
from pipeproof.explain.solver import counts_of, limit_of
from pipeproof.reference.step import Gradient, Site, Stage


@dataclass(frozen=True)
class Shares:
    """A tied parameter's copy: ``counts[stage]`` counts that stage's share.

    ``explained``: only rounding is left. ``absent``: "missing" or "zero" in place of any count. ``turned``: the stage
    whose share has its elements in another order. ``joint``: stages whose shares are known only together, counted at
    the first. ``apart``: groups of stages with equal copies; the groups together make the whole sum.
    """

    stage: Stage
    parameter: str
    counts: dict[Stage, float]
    explained: bool
    absent: str = ""
    turned: Stage | None = None
    joint: tuple[Stage, ...] = ()
    apart: tuple[tuple[Stage, ...], ...] = ()

    @property
    def alone(self) -> bool:
        """True if the stage's share counts once, and nothing else."""
        plain = self.explained and not self.absent and self.turned is None and not self.joint
        return plain and all(count == (stage == self.stage) for stage, count in self.counts.items())

    @property
    def right(self) -> bool:
        """True if every share counts once."""
        whole = not self.absent and self.turned is None and not self.apart
        return self.explained and whole and all(count == 1 for count in self.counts.values())


def explain_tied(update: Update, stages: Sequence[Explanation]) -> tuple[Shares, ...]:
    """Explain each copy for each tied parameter by the stages' shares."""
    found = []
    for copies in update.tied:
        shares = {stage: stages[stage].predict(name) for stage, name in copies.items()}
        wide = _sum([_nominal(stages[stage], name) for stage, name in copies.items()])
        for stage, name in sorted(copies.items()):
            expected = update.expected.get((stage, name))
            if expected is not None:
                limit = limit_of(expected, wide, coarse=update.coarse)
                observed = update.observed.get((stage, name))
                factors = {1.0, *_factor(stages[stage])}  # right, whatever else is wrong, or as its stage is after all
                if observed is not None and any(
                    error(observed.double().cpu(), f * expected.double().cpu()) <= limit for f in factors
                ):
                    copy = Shares(stage, name, dict.fromkeys(shares, 1.0), explained=True)
                else:
                    copy = shares_of((stage, name), observed, shares, limit)
                joint = _joint(copies, shares)
                apart = _groups_apart(update, copies, expected, limit) if joint else ()
                found.append(replace(copy, joint=joint, apart=apart))
    return tuple(found)


def _factor(explanation: Explanation) -> set[float]:
    """A stage's single factor; empty without one, or if unknown."""
    found = {c for term, c in explanation.coefficients.items() if term.nominal or c}
    return found if explanation.explained and len(found) == 1 and all(found) else set()


def shares_of(site: Site, observed: Gradient, shares: Mapping[Stage, Gradient], limit: float) -> Shares:
    """Count each stage's share in the copy at ``site``, or find a share with another order of elements."""
    copy = _copy(*site, observed, shares, limit)
    if observed is None or copy.explained:
        return copy
    return _find_turned(copy, observed, shares, limit) or copy


def _joint(copies: Mapping[Stage, str], shares: Mapping[Stage, Gradient]) -> tuple[Stage, ...]:
    """Stages that hold a copy under one name, if only the first share seems known."""
    joint = []
    for name in sorted(set(copies.values())):
        stages = sorted(stage for stage, own in copies.items() if own == name)
        if len(stages) > 1 and all(shares[stage] is None for stage in stages[1:]):
            joint += stages
    return tuple(sorted(joint))


def _groups_apart(
    update: Update, copies: Mapping[Stage, str], expected: Tensor, limit: float
) -> tuple[tuple[Stage, ...], ...]:
    """Groups of stages with equal gradients, if only all groups together make the sum."""
    groups: list[tuple[Tensor, list[Stage]]] = []
    for stage, name in sorted(copies.items()):
        observed = update.observed.get((stage, name))
        if observed is None or observed.shape != expected.shape:
            return ()
        group = next((stages for known, stages in groups if same_bits(known, observed)), None)
        if group is None:
            groups.append((observed, [stage]))
        else:
            group.append(stage)
    parts = [observed.double().cpu() for observed, _ in groups]
    whole = torch.stack(parts).sum(dim=0)
    if (
        not all(bool(part.any()) for part in parts)
        or len(groups) < 2
        or not error(whole, expected.double().cpu()) <= limit
    ):
        return ()
    return tuple(tuple(stages) for _, stages in groups)


def _copy(stage: Stage, name: str, observed: Gradient, shares: Mapping[Stage, Gradient], limit: float) -> Shares:
    if observed is None or not bool(observed.any()):
        return Shares(stage, name, {}, explained=True, absent="missing" if observed is None else "zero")
    if not bool(observed.isfinite().all()):
        return Shares(stage, name, {}, explained=False)
    known = {holder: share for holder, share in shares.items() if share is not None}
    whole = _sum([*known.values()])
    if whole is not None and error(observed.double().cpu(), whole.double().cpu()) <= limit:
        return Shares(stage, name, dict.fromkeys(known, 1.0), explained=True)
    counts = counts_of(observed, [*known.values()], limit) if known else None
    return Shares(stage, name, dict(zip(known, counts or (), strict=False)), explained=counts is not None)


def _find_turned(copy: Shares, observed: Tensor, shares: Mapping[Stage, Gradient], limit: float) -> Shares | None:
    """Find a copy with all shares, one in a different element order."""
    known = {stage: share for stage, share in shares.items() if share is not None and share.any()}
    turned = []
    for stage, share in known.items():
        rest = observed.double().cpu() - sum(
            (other.double() for s, other in known.items() if s != stage), torch.zeros(())
        )
        more = max((observed.norm() / share.norm()).item(), (observed.abs().max() / share.abs().max()).item(), 1.0)
        if is_reordered(rest, share, limit * more):  # rounding is that of the whole, however small the share
            turned.append(stage)
    if len(turned) != 1:
        return None
    return replace(copy, counts=dict.fromkeys(known, 1.0), explained=True, turned=turned[0])


def _nominal(explanation: Explanation, name: str) -> Gradient:
    return _sum([atom.gradients.get(name) for atom in explanation.atoms if atom.term.nominal])


def _sum(parts: Sequence[Gradient]) -> Gradient:
    found = [part for part in parts if part is not None]
    return torch.stack(found).sum(dim=0) if found else None


def of_copies(every: Sequence[Mapping[Stage, str]], tied: Sequence[Shares]) -> Iterator[Cause]:
    """Yield a cause for each tied parameter in ``every``, and a stage if only one copy differs."""
    for copies in every:
        wrong = [copy for copy in tied if (copy.stage, copy.parameter) in copies.items() and not copy.right]
        if wrong and wrong[0].apart:
            groups = "; ".join(", ".join(map(str, stages)) for stages in wrong[0].apart)
            detail = f"copies of stages {groups} each have a gradient of their own; all copies together make the sum"
            yield Cause("tied-not-summed", parameter=wrong[0].parameter, detail=detail)
            continue
        if wrong and len(wrong) == len(copies) and all(copy.alone for copy in wrong):
            detail = "each copy has its own stage's share alone; all copies together make the sum"
            yield Cause("tied-not-summed", parameter=wrong[0].parameter, detail=detail)
            continue
        known = [copy for copy in wrong if copy.explained]
        whole = {cause_of(copy, copies, "every copy") for copy in known}
        if len(known) == len(copies) and len(whole) == 1:
            yield from whole
            continue
        causes = [cause_of(copy, copies, f"{copy.parameter} of stage {copy.stage}") for copy in known]
        if any(cause.kind == "altered" for cause in causes):
            yield next(cause for cause in causes if cause.kind == "altered")
        elif causes and len({cause.kind for cause in causes}) == 1 and len(causes) == len(copies):
            one = replace(causes[0], stage=None, detail="; ".join(map(_holder_text, causes)))
            yield replace(one, instead=_or_multiplied(wrong, copies) if one.kind == "tied-doubled" else ())
        else:
            yield from causes


def _holder_text(cause: Cause) -> str:
    what = f"{cause.parameter} of stage {cause.stage}"
    return f"{what} has {cause.detail}" if cause.detail else what


def cause_of(copy: Shares, copies: Mapping[Stage, str], where: str) -> Cause:
    """Name a wrong copy's cause; ``copies``: all names, by stage; ``where``: the copy in words."""
    wrong = Cause(copy.absent or "tied-not-summed", stage=copy.stage, parameter=copy.parameter)
    counts = list(copy.counts.values())
    if copy.turned is not None:
        detail = f"its share is in another order, in {where}"
        return Cause("altered", stage=copy.turned, parameter=copies[copy.turned], detail=detail)
    joint = f"stages {', '.join(map(str, copy.joint))} together"
    names = {stage: joint if stage in copy.joint else f"stage {stage}" for stage in copy.counts}
    detail = ", ".join(f"the share of {names[stage]} {count:g} times" for stage, count in copy.counts.items())
    if copy.absent or 0.0 in counts:
        return replace(wrong, detail=detail)
    off = [stage for stage, count in copy.counts.items() if count != 1]
    if len(off) == 1 < len(counts) and off[0] not in copy.joint and not _is_whole(copy.counts[off[0]]):
        return _of_share(copy, off[0], copies, where)
    if all(map(_is_whole, counts)):
        return replace(wrong, kind="tied-doubled", detail=detail)
    if max(counts) - min(counts) <= ALIKE * abs(max(counts)):
        return replace(wrong, kind="scale", factor=counts[0], detail=detail)
    return replace(wrong, detail=detail)


def _is_whole(count: float) -> bool:
    """True if repeated addition may explain a share's count."""
    return count == round(count) and count >= 1


def _or_multiplied(wrong: Sequence[Shares], copies: Mapping[Stage, str]) -> tuple[Cause, ...]:
    """A stage's multiplied share, as an alternative to repeated addition in every copy."""
    off = {(stage, count) for copy in wrong for stage, count in copy.counts.items() if count != 1}
    if len(off) != 1 or any(stage in copy.joint for copy in wrong for stage, _ in off):
        return ()
    ((stage, count),) = off
    text = f"its share is there {count:g} times, the others once, in every copy"
    return (Cause("scale", stage=stage, parameter=copies[stage], factor=count, detail=text),)


def _of_share(copy: Shares, stage: Stage, copies: Mapping[Stage, str], where: str) -> Cause:
    """A stage's multiplied share, in a sum with other stages."""
    count = copy.counts[stage]
    detail = f"its share is there {count:g} times, the others once, in {where}"
    if count == -1:
        return Cause("sign", stage=stage, parameter=copies[stage], detail=detail)
    return Cause("scale", stage=stage, parameter=copies[stage], factor=count, detail=detail)
