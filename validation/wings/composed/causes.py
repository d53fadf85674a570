"""Why a composed check fails: what the chain shows, what each rank finds of its own gradients, both put together."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

from torch import Tensor

from pipeproof.core.cause import Cause
from pipeproof.core.measuring import trace_of
from pipeproof.core.observe.sketch import Sketch
from pipeproof.core.verdict import Verdict
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.explain import explain_safely, explain_verdict
from pipeproof.explain.loss_scale import LossScale
from pipeproof.explain.rules.factors import by_loss_scale
from pipeproof.explain.tied import Shares, name_open, of_copies
from pipeproof.reference.step import Expected, Site
from pipeproof.wings.composed.weights import weights_apart
from pipeproof.wings.composed.whole import Whole

_OF_PARTS = "put together on one rank it gives something else: is a reduction over its ranks missing?"
_NOT_SUMMED = (
    "{} of its gradients are not the same on ranks {}, and together they are the expected ones: they are parts of one "
    "sum, were reduced before all was added to them, over other ranks, or not at all"
)
Pair = tuple[Sketch, Sketch]  # a gradient as observed and as expected


@dataclass
class OwnEvidence:
    """Evidence that one rank has about a mismatch.

    ``causes``: of its mismatches, and why some have none. ``copies``: the shares that make up its gradients of shared
    parameters. ``wrong``: its wrong gradients. ``forms``: the types of its parameters. ``scale``: the factor on its
    losses.
    """

    causes: list[Cause] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    copies: list[Shares] = field(default_factory=list)
    wrong: dict[Site, Pair] = field(default_factory=dict)
    forms: Mapping[str, Tensor] = field(default_factory=dict)
    scale: LossScale | None = None


@dataclass(frozen=True)
class RightStep:
    """Facts about the right step; for a chain without the shares of gradients, which ranks find out."""

    expected: Expected
    weights: Mapping[str, Tensor]
    update: Any = None


def explain(
    verdict: Verdict, wholes: Sequence[Whole], ranks: Sequence[OwnEvidence], replicas: Sequence[int]
) -> Verdict:
    """Add causes to ``verdict`` on ``wholes``: the chain's first, then the ranks'.

    ``replicas``: the replica that each of ``ranks`` works on; several lines may be parts of it.
    """
    first = next((one.rank for one in verdict.mismatches[:1]), None)
    whole = next((one for one in wholes if first is not None and one.parts[first].stages), wholes[0])
    verdict = replace(verdict, measured=replace(verdict.measured, ran=trace_of(whole.observed, 0)))
    if not verdict.mismatches:
        return verdict
    own = {rank: one for rank, one in enumerate(ranks) if whole.parts[rank].stages}
    evidence = _of_chain(verdict, whole, own)
    flows = {one.law for one in verdict.mismatches} - {"gradient", "presence"}
    found = explain_safely(verdict, lambda: explain_verdict(evidence)) if flows else verdict
    of_ranks = [by_loss_scale(one, replace(evidence, scale=rank.scale)) for rank in own.values() for one in rank.causes]
    copies = [copy for one in own.values() for copy in one.copies]
    of_ranks += of_copies([*whole.agreed.copies.values()], copies)
    shown = () if whole.chain.sources.unsure else found.causes  # a flow may be due to any of equal outputs
    if len({*replicas}) < len(wholes):  # put together of several ranks' parts, a stage is other code
        other = {one for one in shown if one.kind == "computation" and not one.in_backward}
        shown = tuple(replace(one, detail=f"{one.detail}; {_OF_PARTS}") if one in other else one for one in shown)
    causes = _join(shown, of_ranks, evidence.stages) or [*not_summed([one.wrong for one in ranks], replicas)]
    causes = list(dict.fromkeys([*weights_apart(verdict.mismatches), *causes]))
    whys = [why for one in own.values() for why in one.undecided]
    undecided = dict.fromkeys([*found.undecided, *whys, *name_open(copies)])
    return replace(found, causes=tuple(causes), undecided=() if causes else tuple(undecided))


def _of_chain(verdict: Verdict, whole: Whole, own: Mapping[int, OwnEvidence]) -> Evidence:
    observed, expected = whole.observed, whole.expected
    scale, skips = own[observed.schedule.placement[-1]].scale, whole.by.factor(expected.norm or 0.0) is None
    flows = {stage: replace(one, complete=one.complete or not one.untold) for stage, one in whole.passed.items()}
    return Evidence(
        verdict,
        observed.schedule.placement,
        whole.chain.microbatches,
        len(whole.parts),
        gradients={},
        norms=[row[0].norm for row in observed.ranks],
        run=observed,
        passed=flows,
        right=RightStep(expected, {name: form for one in own.values() for name, form in one.forms.items()}),
        clipped_to=whole.by.max_norm,
        scale=None if scale is None else replace(scale, skips=skips),
        lengths=whole.lengths,
    )


def _join(shown: Sequence[Cause], own: Sequence[Cause], stages: int) -> list[Cause]:
    """Merge causes ``shown`` by the chain with the ranks' ``own`` at other stages.

    For one stage, the chain's comes first in the flow. The less specific cause gives way: a backward that computed
    something else, or weights that moved differently from their master copies. What all ``stages`` share is a cause at
    the whole step.
    """
    less = {("computation", one.stage) for one in own}
    left = [one for one in shown if not (one.in_backward and (one.kind, one.stage) in less)]
    if any(one.kind == "update" for one in own):
        left = [one for one in left if one.kind != "update"]
    places = {stage for one in left for stage in (one.stage, *one.stages)} - {None}
    alike: dict[Cause, list[Cause]] = {}
    for cause in [*left, *(one for one in own if one.stage not in places)]:
        alike.setdefault(replace(cause, rank=None, stage=None, factor=None), []).append(cause)
    for those in alike.values():
        if 1 < stages == len(those):
            those[:] = [replace(those[0], rank=None, stage=None)]
    return [cause for those in alike.values() for cause in those]


def not_summed(ranks: Sequence[Mapping[Site, Pair]], replicas: Sequence[int]) -> Iterator[Cause]:
    """Yield gradients that differ between ranks of a replica, or between all ranks, and add up to the expected ones."""
    found: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for stage, name in dict.fromkeys(site for wrong in ranks for site in wrong):
        pairs = {rank: wrong[stage, name] for rank, wrong in enumerate(ranks) if (stage, name) in wrong}
        groups = [tuple(rank for rank in pairs if replicas[rank] == replica) for replica in sorted({*replicas})]
        for group in [one for one in groups if len(one) > 1] or [tuple(pairs)]:
            parts = [pairs[rank][0] for rank in group]
            whole = reduce(Sketch.plus, parts)
            sums = [all(whole.is_like(pairs[rank][1].times(n)) for rank in group) for n in (1, len(group))]
            if any(sums) and not all(one.is_like(parts[0]) for one in parts):
                found.setdefault((stage, group), []).append(name)
    for (stage, group), names in found.items():
        alone = names[0] if len(names) == 1 else None
        detail = _NOT_SUMMED.format(len(names), ", ".join(map(str, group)))
        yield Cause("not-reduced", rank=group[0], stage=stage, parameter=alone, detail=detail)
