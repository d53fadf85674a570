"""Copies by tied parameter: how often each stage's share counts in each gradient."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipeproof.core.cause import Cause, join_numbers
from pipeproof.core.tolerance import error, same_bits
from pipeproof.explain.atoms import Explanation, Update, total
from pipeproof.explain.likeness import is_reordered
from pipeproof.explain.limits import ALIKE
from pipeproof.explain.solver import counts_of, limit_of
from pipeproof.reference.step import Gradient, Site, Stage


@dataclass(frozen=True)
class Shares:
    """A tied parameter's copy: ``counts[stage]`` counts that stage's share.

    ``explained``: only rounding is left. ``absent``: "missing" or "zero" in place of any count. ``turned``: the stage
    whose share has its elements in another order. ``joint``: stages whose shares are known only together, counted at
    the first. ``apart``: groups of stages with equal copies; the groups together make the whole sum. ``lacking``: the
    microbatches that a stage's share lacks, where nothing else is wrong.
    """

    stage: Stage
    parameter: str
    counts: dict[Stage, float]
    explained: bool
    absent: str = ""
    turned: Stage | None = None
    joint: tuple[Stage, ...] = ()
    apart: tuple[tuple[Stage, ...], ...] = ()
    lacking: tuple[tuple[Stage, tuple[int, ...]], ...] = ()

    @property
    def alone(self) -> bool:
        """True if the stage's share counts once, and nothing else."""
        plain = self.explained and not self.absent and self.turned is None and not self.joint and not self.lacking
        return plain and all(count == (stage == self.stage) for stage, count in self.counts.items())

    @property
    def right(self) -> bool:
        """True if every share counts once."""
        whole = not self.absent and self.turned is None and not self.apart and not self.lacking
        return self.explained and whole and all(count == 1 for count in self.counts.values())


def explain_tied(update: Update, stages: Sequence[Explanation]) -> tuple[Shares, ...]:
    """Explain each copy for each tied parameter by the stages' shares."""
    found = []
    for copies in update.tied:
        shares = {stage: stages[stage].predict(name) for stage, name in copies.items()}
        nominal = ((atom, name) for s, name in copies.items() for atom in stages[s].atoms if atom.term.nominal)
        wide = total(atom.gradients.get(name) for atom, name in nominal)
        for stage, name in sorted(copies.items()):
            expected, observed = update.expected.get((stage, name)), update.observed.get((stage, name))
            if expected is None:
                continue
            limit = limit_of(expected, wide, coarse=update.coarse)
            of_stage = {c for term, c in stages[stage].coefficients.items() if term.nominal or c}
            alike = stages[stage].explained and len(of_stage) == 1
            factors = {1.0, *(of_stage - {0.0} if alike else ())}  # right, whatever else is wrong, or as its stage is
            whole = expected.double().cpu()
            if observed is not None and any(error(observed.double().cpu(), f * whole) <= limit for f in factors):
                copy = Shares(stage, name, dict.fromkeys(shares, 1.0), explained=True)
            else:
                copy = shares_of((stage, name), observed, shares, limit)
                if observed is not None and not copy.explained:
                    each = {
                        (s, atom.term.activation): one
                        for s, own in copies.items()
                        for atom in stages[s].atoms
                        if atom.term.nominal
                        and atom.term.what == "pair"
                        and (one := atom.gradients.get(own)) is not None
                    }
                    counts = counts_of(observed, [*each.values()], limit) if each else None
                    if counts is not None and set(counts) == {0.0, 1.0}:
                        lost = [at for at, count in zip(each, counts, strict=True) if not count]
                        lacking = [(s, tuple(m for of, m in lost if of == s)) for s in sorted({of for of, _ in lost})]
                        copy = Shares(stage, name, {}, explained=True, lacking=tuple(lacking))
            joint = _joint(copies, shares)
            apart = _groups_apart(update, copies, expected, limit) if joint else ()
            found.append(replace(copy, joint=joint, apart=apart))
    return tuple(found)


def shares_of(site: Site, observed: Gradient, shares: Mapping[Stage, Gradient], limit: float) -> Shares:
    """Count each stage's share in the copy at ``site``, or find a share with another order of elements."""
    if observed is None or not bool(observed.any()):
        return Shares(*site, {}, explained=True, absent="missing" if observed is None else "zero")
    if not bool(observed.isfinite().all()):
        return Shares(*site, {}, explained=False)
    known = {holder: share for holder, share in shares.items() if share is not None}
    whole = total(known.values())
    if whole is not None and error(observed.double().cpu(), whole.double().cpu()) <= limit:
        return Shares(*site, dict.fromkeys(known, 1.0), explained=True)
    counts = counts_of(observed, [*known.values()], limit) if known else None
    if counts is not None:
        return Shares(*site, dict(zip(known, counts, strict=True)), explained=True)
    there = {stage: share for stage, share in known.items() if share.any()}
    turned = []
    for stage, share in there.items():
        others = [other.double() for s, other in there.items() if s != stage]
        rest = observed.double().cpu() - sum(others, torch.zeros(()))
        more = max((observed.norm() / share.norm()).item(), (observed.abs().max() / share.abs().max()).item(), 1.0)
        if is_reordered(rest, share, limit * more):  # rounding is that of the whole, however small the share
            turned.append(stage)
    if len(turned) == 1:
        return Shares(*site, dict.fromkeys(there, 1.0), explained=True, turned=turned[0])
    return Shares(*site, {}, explained=False)


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
            groups.append((observed, group := []))
        group.append(stage)
    parts = [observed.double().cpu() for observed, _ in groups]
    several = len(parts) > 1 and all(bool(part.any()) for part in parts)
    whole = several and error(torch.stack(parts).sum(dim=0), expected.double().cpu()) <= limit
    return tuple(tuple(stages) for _, stages in groups) if whole else ()


def name_open(tied: Sequence[Shares]) -> Iterator[str]:
    """Say which copies no count of shares explains."""
    open_ = [copy for copy in tied if not copy.explained and not copy.apart]
    for copy in (one for one in open_ if not one.joint):
        yield f"stage {copy.stage}: the gradient of {copy.parameter} is no sum of the stages' shares"
    for name, joint in dict.fromkeys((copy.parameter, copy.joint) for copy in open_ if copy.joint):
        yield f"what stages {join_numbers(joint)} each give to {name} is not known apart, so its fault is not known"


def of_copies(every: Sequence[Mapping[Stage, str]], tied: Sequence[Shares]) -> Iterator[Cause]:
    """Yield a cause for each tied parameter in ``every``, and a stage if only one copy differs."""
    for copies in every:
        wrong = [copy for copy in tied if (copy.stage, copy.parameter) in copies.items() and not copy.right]
        all_wrong = len(wrong) == len(copies)
        alone = all_wrong and all(copy.alone for copy in wrong)
        if wrong and (wrong[0].apart or alone):
            groups = "; ".join(", ".join(map(str, stages)) for stages in wrong[0].apart)
            what = f"copies of stages {groups} each have a gradient of their own" if groups else ""
            what = what or "each copy has its own stage's share alone"
            detail = f"{what}; all copies together make the sum"
            yield Cause("tied-not-summed", parameter=wrong[0].parameter, detail=detail)
            continue
        known = [copy for copy in wrong if copy.explained]
        whole = {_cause(copy, copies, "every copy") for copy in known}
        causes = [_cause(copy, copies, f"{copy.parameter} of stage {copy.stage}") for copy in known]
        altered = [cause for cause in causes if cause.kind == "altered"]
        if all_wrong and len(known) == len(copies) and len(whole) == 1:
            yield from whole
        elif altered:
            yield altered[0]
        elif len({cause.kind for cause in causes}) == 1 and len(causes) == len(copies):
            named = [(f"{cause.parameter} of stage {cause.stage}", cause.detail) for cause in causes]
            details = [f"{what} has {detail}" if detail else what for what, detail in named]
            one = replace(causes[0], stage=None, detail="; ".join(details))
            off = {(stage, count) for copy in wrong for stage, count in copy.counts.items() if count != 1}
            joint = any(stage in copy.joint for copy in wrong for stage, _ in off)
            if one.kind == "tied-doubled" and len(off) == 1 and not joint:  # or its share was multiplied
                ((stage, count),) = off
                one = replace(one, instead=(_of_share(stage, count, copies, "every copy"),))
            yield one
        else:
            yield from causes


def _cause(copy: Shares, copies: Mapping[Stage, str], where: str) -> Cause:
    """Name a wrong copy's cause; ``copies``: all names, by stage; ``where``: the copy in words."""
    wrong = Cause(copy.absent or "tied-not-summed", stage=copy.stage, parameter=copy.parameter)
    counts = list(copy.counts.values())
    if copy.turned is not None:
        detail = f"its share is in another order, in {where}"
        return Cause("altered", stage=copy.turned, parameter=copies[copy.turned], detail=detail)
    if copy.lacking:
        several = [f"microbatch{'es' * (len(those) > 1)} {join_numbers(those)}" for _, those in copy.lacking]
        each = [f"the share of stage {s} without {what}" for (s, _), what in zip(copy.lacking, several, strict=True)]
        lost = sorted({m for _, those in copy.lacking for m in those})
        return replace(wrong, microbatches=tuple(lost), detail="; ".join(each))
    joint = f"stages {', '.join(map(str, copy.joint))} together"
    names = {stage: joint if stage in copy.joint else f"stage {stage}" for stage in copy.counts}
    detail = ", ".join(f"the share of {names[stage]} {count:g} times" for stage, count in copy.counts.items())
    if copy.absent or 0.0 in counts:
        return replace(wrong, detail=detail)
    off = [(stage, count) for stage, count in copy.counts.items() if count != 1]
    again = {count: count == round(count) >= 1 for count in counts}  # repeated addition may explain these
    if len(off) == 1 < len(counts) and off[0][0] not in copy.joint and not again[off[0][1]]:
        return _of_share(*off[0], copies, where)
    if all(again.values()):
        return replace(wrong, kind="tied-doubled", detail=detail)
    if max(counts) - min(counts) <= ALIKE * abs(max(counts)):
        return replace(wrong, kind="scale", factor=counts[0], detail=detail)
    return replace(wrong, detail=detail)


def _of_share(stage: Stage, count: float, copies: Mapping[Stage, str], where: str) -> Cause:
    """A stage's multiplied share, in a sum with other stages."""
    detail = f"its share is there {count:g} times, the others once, in {where}"
    kind, factor = ("sign", None) if count == -1 else ("scale", count)
    return Cause(kind, stage=stage, parameter=copies[stage], factor=factor, detail=detail)
