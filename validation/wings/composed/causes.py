"""Why a composed check fails: what the chain shows, and what ranks found of their own, put together."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

from torch import Tensor

from pipeproof.core.cause import Cause
from pipeproof.core.measuring import ran_of
from pipeproof.core.verdict import Verdict
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.explain import explained, sought
from pipeproof.explain.loss_scale import LossScale
from pipeproof.explain.rules.factors import by_loss_scale
from pipeproof.explain.tied import Shares, of_copies
from pipeproof.observers.sketch import Sketch
from pipeproof.reference.step import Site
from pipeproof.wings.composed.own_causes import RightStep
from pipeproof.wings.composed.ties import copies_of
from pipeproof.wings.composed.weights import weights_apart
from pipeproof.wings.composed.whole import Whole

_OF_PARTS = "put together on one rank it gives something else: is a reduction over its ranks missing?"
_NOT_SUMMED = (
    "{} of its gradients are not the same on ranks {}, and together they are the expected ones: they are parts of one "
    "sum, were reduced before all was added to them, over other ranks, or not at all"
)


@dataclass
class OwnEvidence:
    """What one rank knows of why something is wrong.

    ``causes`` of what is wrong with its gradients and weights, and why none is known of some. ``copies``: what its
    gradients of shared parameters are made of. ``wrong``: its gradients that are not what they must be, as observed and
    as expected. ``forms`` have the types of its parameters. ``scale``: how its losses are scaled.
    """

    causes: list[Cause] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    copies: list[Shares] = field(default_factory=list)
    wrong: dict[Site, tuple[Sketch, Sketch]] = field(default_factory=dict)
    forms: Mapping[str, Tensor] = field(default_factory=dict)
    scale: LossScale | None = None


def explain(
    verdict: Verdict, wholes: Sequence[Whole], ranks: Sequence[OwnEvidence], replicas: Sequence[int]
) -> Verdict:
    """``verdict`` on ``wholes`` with the causes of what is wrong first: what the chain shows, then what ranks found.

    ``replicas``: the number of the one that each of ``ranks`` works on, of which several lines may be parts.
    """
    first = next((one.rank for one in verdict.mismatches[:1]), None)
    whole = next((one for one in wholes if first is not None and one.parts[first].stages), wholes[0])
    verdict = replace(verdict, measured=replace(verdict.measured, ran=ran_of(whole.observed, 0)))
    if not verdict.mismatches:
        return verdict
    own = {rank: one for rank, one in enumerate(ranks) if whole.parts[rank].stages}
    evidence = _evidence(verdict, whole, own)
    flows = {one.law for one in verdict.mismatches} - {"gradient", "presence"}
    found = sought(verdict, lambda: explained(evidence)) if flows else verdict
    parted = len({*replicas}) < len(wholes)
    told = [by_loss_scale(one, replace(evidence, scale=rank.scale)) for rank in own.values() for one in rank.causes]
    copies = [*copies_of(whole.held, whole.first).values()]
    told += of_copies(copies, [copy for one in own.values() for copy in one.copies])
    known = () if whole.chain.sources.unsure else found.cause  # a flow may be due to any of equal outputs
    causes = _beside([_of_parts(one) for one in known] if parted else known, told)
    causes = _of_all(causes, evidence.stages) or list(not_summed([one.wrong for one in ranks], replicas))
    causes = list(dict.fromkeys([*weights_apart(verdict.mismatches), *causes]))
    undecided = dict.fromkeys([*found.undecided, *(why for one in own.values() for why in one.undecided)])
    return replace(found, cause=tuple(causes), undecided=() if causes else tuple(undecided))


def _evidence(verdict: Verdict, whole: Whole, own: Mapping[int, OwnEvidence]) -> Evidence:
    seen, made, flows = whole.observed, whole.expected, whole.passed.items()
    scale, skips = own[seen.schedule.placement[-1]].scale, whole.by.factor(made.norm or 0.0) is None
    return Evidence(
        verdict,
        seen.schedule.placement,
        whole.chain.microbatches,
        len(whole.parts),
        gradients={},
        norms=[row[0].norm for row in seen.ranks],
        seen=seen,
        passed={stage: replace(one, complete=one.complete or not one.untold) for stage, one in flows},
        due=RightStep(made, {name: form for one in own.values() for name, form in one.forms.items()}),
        clipped_to=whole.by.max_norm,
        scale=None if scale is None else replace(scale, skips=skips),
        lengths=whole.lengths,
    )


def _of_parts(cause: Cause) -> Cause:
    """``cause``, where stages that are run again are put together of the parts of several ranks: that is other code."""
    computed = cause.kind == "computation" and not cause.in_backward
    return replace(cause, detail=f"{cause.detail}; {_OF_PARTS}") if computed else cause


def _beside(shown: Sequence[Cause], own: Sequence[Cause]) -> list[Cause]:
    """``shown`` by the chain, and what ranks found on their ``own`` at other stages.

    Where both are of one stage, the chain's comes first in the flow; but what says less gives way: that a backward
    computed something else, or that weights moved otherwise where they are not their master copies.
    """
    less = {("computation", one.stage) for one in own}
    left = [one for one in shown if not (one.in_backward and (one.kind, one.stage) in less)]
    if any(one.kind == "update" for one in own):
        left = [one for one in left if one.kind != "update"]
    places = {stage for one in left for stage in (one.stage, *one.stages)} - {None}
    return [*left, *(one for one in own if one.stage not in places)]


def _of_all(causes: Sequence[Cause], stages: int) -> list[Cause]:
    """``causes``; one that all stages have is of the whole step."""
    alike: dict[Cause, list[Cause]] = {}
    for cause in causes:
        alike.setdefault(replace(cause, rank=None, stage=None, factor=None), []).append(cause)
    for whole, those in alike.items():
        alike[whole] = [replace(those[0], rank=None, stage=None)] if 1 < stages == len(those) else those
    return [cause for those in alike.values() for cause in those]


def not_summed(ranks: Sequence[Mapping[Site, tuple[Sketch, Sketch]]], replicas: Sequence[int]) -> Iterator[Cause]:
    """Gradients that differ on the ranks of one of the ``replicas``, or of all, and together are the expected ones."""
    found: dict[tuple[int, tuple[int, ...]], list[str]] = {}
    for stage, name in dict.fromkeys(site for wrong in ranks for site in wrong):
        pairs = {rank: wrong[stage, name] for rank, wrong in enumerate(ranks) if (stage, name) in wrong}
        groups = [tuple(rank for rank in pairs if replicas[rank] == replica) for replica in sorted({*replicas})]
        for group in [one for one in groups if len(one) > 1] or [tuple(pairs)]:
            if _makes_up([pairs[rank] for rank in group]):
                found.setdefault((stage, group), []).append(name)
    for (stage, group), names in found.items():
        alone = names[0] if len(names) == 1 else None
        detail = _NOT_SUMMED.format(len(names), ", ".join(map(str, group)))
        yield Cause("not-reduced", rank=group[0], stage=stage, parameter=alone, detail=detail)


def _makes_up(pairs: Sequence[tuple[Sketch, Sketch]]) -> bool:
    """Whether what ranks have is not one, and added up, or averaged, what is expected of each."""
    observed = [one for one, _ in pairs]
    whole = reduce(Sketch.plus, observed)
    unlike = any(not one.is_like(observed[0]) for one in observed)
    return unlike and any(all(whole.is_like(due.times(times)) for _, due in pairs) for times in (1, len(pairs)))
