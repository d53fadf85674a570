"""The copies of tied parameters: how often each stage's share is in each copy's gradient."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeproof.core.cause import Cause
from pipeproof.core.tolerance import error, same_bits
from pipeproof.explain.atoms import Update
from pipeproof.explain.explanation import Explanation
from pipeproof.explain.limits import ALIKE
from pipeproof.explain.reordering import reordered
from pipeproof.explain.solver import counts_of, limit_of
from pipeproof.reference.step import Gradient, Site, Stage


@dataclass(frozen=True)
class Shares:
    """One copy of a tied parameter: ``counts[stage]`` is how often that stage's share is in its gradient.

    ``explained``: that leaves only rounding. ``absent``: "missing" or "zero" in place of any count. ``turned``: the
    stage whose share's elements are in another order. ``joint``: the stages whose shares are known as one alone, which
    is counted at the first of them. ``apart``: the stages whose copies are alike; what these groups have makes the
    whole sum.
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
        """Whether it has the share of its own stage once, and nothing else."""
        plain = self.explained and not self.absent and self.turned is None and not self.joint
        return plain and all(count == (stage == self.stage) for stage, count in self.counts.items())

    @property
    def right(self) -> bool:
        """Whether every share is in it once."""
        whole = not self.absent and self.turned is None and not self.apart
        return self.explained and whole and all(count == 1 for count in self.counts.values())


def explain_tied(update: Update, stages: Sequence[Explanation]) -> tuple[Shares, ...]:
    """Each copy of each parameter that stages share, in terms of what the stages are known to give."""
    found = []
    for copies in update.tied:
        shares = {stage: stages[stage].predicted(name) for stage, name in copies.items()}
        wide = _sum([_nominal(stages[stage], name) for stage, name in copies.items()])
        for stage, name in sorted(copies.items()):
            due = update.expected.get((stage, name))
            if due is not None:
                limit = limit_of(due, wide, coarse=update.coarse)
                seen = update.observed.get((stage, name))
                factors = {1.0, *_factor(stages[stage])}  # right, whatever else is wrong, or as its stage is after all
                if seen is not None and any(
                    error(seen.double().cpu(), f * due.double().cpu()) <= limit for f in factors
                ):
                    copy = Shares(stage, name, dict.fromkeys(shares, 1.0), explained=True)
                else:
                    copy = shares_of((stage, name), seen, shares, limit)
                joint = _joint(copies, shares)
                apart = _apart(update, copies, due, limit) if joint else ()
                found.append(replace(copy, joint=joint, apart=apart))
    return tuple(found)


def _factor(explanation: Explanation) -> set[float]:
    """The one factor of all that a stage has; empty where that is not one, or not known."""
    found = {c for term, c in explanation.coefficients.items() if term.nominal or c}
    return found if explanation.explained and len(found) == 1 and all(found) else set()


def shares_of(site: Site, seen: Gradient, shares: Mapping[Stage, Gradient], limit: float) -> Shares:
    """What the copy at ``site`` is made of: how often of each stage's share, or which of these it has otherwise."""
    copy = _copy(*site, seen, shares, limit)
    if seen is None or copy.explained:
        return copy
    return _turned(copy, seen, shares, limit) or copy


def _joint(copies: Mapping[Stage, str], shares: Mapping[Stage, Gradient]) -> tuple[Stage, ...]:
    """The stages that hold a copy under one name of which the first is known to have a share alone."""
    joint = []
    for name in sorted(set(copies.values())):
        stages = sorted(stage for stage, own in copies.items() if own == name)
        if len(stages) > 1 and all(shares[stage] is None for stage in stages[1:]):
            joint += stages
    return tuple(sorted(joint))


def _apart(update: Update, copies: Mapping[Stage, str], due: Tensor, limit: float) -> tuple[tuple[Stage, ...], ...]:
    """The stages that have the same gradient, group by group, where only all groups together make the sum."""
    groups: list[tuple[Tensor, list[Stage]]] = []
    for stage, name in sorted(copies.items()):
        seen = update.observed.get((stage, name))
        if seen is None or seen.shape != due.shape:
            return ()
        group = next((stages for known, stages in groups if same_bits(known, seen)), None)
        if group is None:
            groups.append((seen, [stage]))
        else:
            group.append(stage)
    parts = [seen.double().cpu() for seen, _ in groups]
    whole = torch.stack(parts).sum(dim=0)
    if not all(bool(part.any()) for part in parts) or len(groups) < 2 or not error(whole, due.double().cpu()) <= limit:
        return ()
    return tuple(tuple(stages) for _, stages in groups)


def _copy(stage: Stage, name: str, seen: Gradient, shares: Mapping[Stage, Gradient], limit: float) -> Shares:
    if seen is None or not bool(seen.any()):
        return Shares(stage, name, {}, explained=True, absent="missing" if seen is None else "zero")
    if not bool(seen.isfinite().all()):
        return Shares(stage, name, {}, explained=False)
    known = {holder: share for holder, share in shares.items() if share is not None}
    whole = _sum([*known.values()])
    if whole is not None and error(seen.double().cpu(), whole.double().cpu()) <= limit:
        return Shares(stage, name, dict.fromkeys(known, 1.0), explained=True)
    counts = counts_of(seen, [*known.values()], limit) if known else None
    return Shares(stage, name, dict(zip(known, counts or (), strict=False)), explained=counts is not None)


def _turned(copy: Shares, seen: Tensor, shares: Mapping[Stage, Gradient], limit: float) -> Shares | None:
    """A copy that is the sum of all shares but for the order of elements of one."""
    known = {stage: share for stage, share in shares.items() if share is not None and share.any()}
    turned = []
    for stage, share in known.items():
        rest = seen.double().cpu() - sum((other.double() for s, other in known.items() if s != stage), torch.zeros(()))
        more = max((seen.norm() / share.norm()).item(), (seen.abs().max() / share.abs().max()).item(), 1.0)
        if reordered(rest, share, limit * more):  # rounding is that of the whole, however small the share
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
    """One cause for each tied parameter, with its copies in ``every``, and a stage if only one of them is wrong."""
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
            one = replace(causes[0], stage=None, detail="; ".join(map(_held, causes)))
            yield replace(one, instead=_or_multiplied(wrong, copies) if one.kind == "tied-doubled" else ())
        else:
            yield from causes


def _held(cause: Cause) -> str:
    what = f"{cause.parameter} of stage {cause.stage}"
    return f"{what} has {cause.detail}" if cause.detail else what


def cause_of(copy: Shares, copies: Mapping[Stage, str], where: str) -> Cause:
    """What a wrong copy shows; ``copies`` are the names of all of them, by stage, and ``where`` says which it is."""
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
    """Whether a share may be there that often by being added again."""
    return count == round(count) and count >= 1


def _or_multiplied(wrong: Sequence[Shares], copies: Mapping[Stage, str]) -> tuple[Cause, ...]:
    """That one stage's share was multiplied, which every copy would show as it does one that is added again."""
    off = {(stage, count) for copy in wrong for stage, count in copy.counts.items() if count != 1}
    if len(off) != 1 or any(stage in copy.joint for copy in wrong for stage, _ in off):
        return ()
    ((stage, count),) = off
    told = f"its share is there {count:g} times, the others once, in every copy"
    return (Cause("scale", stage=stage, parameter=copies[stage], factor=count, detail=told),)


def _of_share(copy: Shares, stage: Stage, copies: Mapping[Stage, str], where: str) -> Cause:
    """That the share of one stage, which is added up with the others, was multiplied."""
    count = copy.counts[stage]
    detail = f"its share is there {count:g} times, the others once, in {where}"
    if count == -1:
        return Cause("sign", stage=stage, parameter=copies[stage], detail=detail)
    return Cause("scale", stage=stage, parameter=copies[stage], factor=count, detail=detail)
