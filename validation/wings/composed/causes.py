"""Why a composed check fails: what the chain shows, what each rank finds of its own gradients, both put together."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce

from torch import Tensor

from pipeproof.core.cause import Cause
from pipeproof.core.judge import conclude
from pipeproof.core.ledger import Ledger
from pipeproof.core.measuring import trace_of
from pipeproof.core.observe.sketch import Sketch, sketch
from pipeproof.core.verdict import Verdict
from pipeproof.explain.atoms import Update
from pipeproof.explain.cause_rules import STALE
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.explain import explain_safely, explain_verdict
from pipeproof.explain.loss_scale import LossScale
from pipeproof.explain.rules.factors import by_loss_scale
from pipeproof.explain.tied import Shares, of_copies
from pipeproof.reference.copied import deep_copy
from pipeproof.reference.step import Expected, Gradient, Site, dense
from pipeproof.reference.traced import Traced
from pipeproof.whitebox.crossings import is_near
from pipeproof.wings.composed.collect import Begun
from pipeproof.wings.composed.rerun import StageRerun
from pipeproof.wings.composed.shards import OwnShards
from pipeproof.wings.composed.weights import weights_apart
from pipeproof.wings.composed.whole import Whole
from pipeproof.worlds.settings import drawing_apart

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
    made: Update | None = None

    @property
    def update(self) -> Update:
        assert self.made is not None, "no gradients are there to be explained"
        return self.made


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
    causes = _of_all(_add_own(shown, of_ranks), evidence.stages) or [
        *not_summed([one.wrong for one in ranks], replicas)
    ]
    causes = list(dict.fromkeys([*weights_apart(verdict.mismatches), *causes]))
    undecided = dict.fromkeys([*found.undecided, *(why for one in own.values() for why in one.undecided)])
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


def _add_own(shown: Sequence[Cause], own: Sequence[Cause]) -> list[Cause]:
    """Merge causes ``shown`` by the chain with the ranks' ``own`` at other stages.

    For one stage, the chain's comes first in the flow. The less specific cause gives way: a backward that computed
    something else, or weights that moved differently from their master copies.
    """
    less = {("computation", one.stage) for one in own}
    left = [one for one in shown if not (one.in_backward and (one.kind, one.stage) in less)]
    if any(one.kind == "update" for one in own):
        left = [one for one in left if one.kind != "update"]
    places = {stage for one in left for stage in (one.stage, *one.stages)} - {None}
    return [*left, *(one for one in own if one.stage not in places)]


def _of_all(causes: Sequence[Cause], stages: int) -> list[Cause]:
    """Join ``causes`` that all stages share into a cause at the whole step."""
    alike: dict[Cause, list[Cause]] = {}
    for cause in causes:
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
            if _makes_up([pairs[rank] for rank in group]):
                found.setdefault((stage, group), []).append(name)
    for (stage, group), names in found.items():
        alone = names[0] if len(names) == 1 else None
        detail = _NOT_SUMMED.format(len(names), ", ".join(map(str, group)))
        yield Cause("not-reduced", rank=group[0], stage=stage, parameter=alone, detail=detail)


def _makes_up(pairs: Sequence[Pair]) -> bool:
    """True if the ranks' parts differ, and their sum or mean is the expected gradient."""
    observed = [one for one, _ in pairs]
    whole = reduce(Sketch.plus, observed)
    unlike = any(not one.is_like(observed[0]) for one in observed)
    return unlike and any(all(whole.is_like(one.times(times)) for _, one in pairs) for times in (1, len(pairs)))


@dataclass(frozen=True)
class StageGradients:
    """The gradients of one stage on this rank, by the model's names.

    ``full_names``: the model's name of each of the stage's. ``begun``: their values before the step. This rank observes
    only its own shards; elements of other ranks are zero here.
    """

    full_names: Mapping[str, str]
    observed: Mapping[str, Tensor | None]
    begun: Begun
    shards: OwnShards

    def part(self, name: str, whole: Gradient) -> Gradient:
        """Return a ``whole`` gradient, by the stage's name, with zeros for other ranks' elements."""
        return self.shards.own_part(self.full_names[name], whole) if name in self.full_names else whole

    def parts(self, whole: Mapping[Site, Gradient]) -> dict[Site, Gradient]:
        """Return all gradients this way, with all their elements."""
        every = whole.items()
        return {site: None if one is None else self.part(site[1], dense(one)) for site, one in every}


_SEVERAL = "several calls have the number of one microbatch, so a number does not say which of them a gradient lacks"


def own_causes(
    own: StageRerun, ledger: Ledger, numbers: Sequence[int], gradients: StageGradients, *, placement: Sequence[int]
) -> Verdict:
    """Return a verdict on a rank's ``gradients`` of ``own``, with causes of mismatches.

    ``ledger``: the mismatches. ``numbers``: the microbatch of each call. ``placement``: the rank of every stage. Small
    differences are not split by microbatches: rounding of each is as large.
    """
    local, names = conclude(ledger, f"stage {own.stage}"), gradients.full_names
    wrong = [one for one in local.mismatches if one.stage == own.stage and one.parameter in names.values()]
    local = replace(local, mismatches=tuple(wrong))
    if local.outcome == "unknown":
        return local
    found = explain_safely(local, lambda: explain_verdict(_of_stage(own, local, gradients, placement)))
    batches = [numbers[k] for k in own.numbers]
    several = {m for m, number in enumerate(batches) if batches.count(number) > 1}  # ambiguous numbers
    if any(several & {*cause.microbatches} for cause in found.causes):
        return replace(found, causes=(), undecided=(*found.undecided, _SEVERAL))
    causes = [
        replace(
            cause,
            rank=placement[own.stage],
            stage=own.stage,
            microbatches=tuple(sorted(batches[m] for m in cause.microbatches)),
            parameter=None if cause.parameter is None else names.get(cause.parameter, cause.parameter),
        )
        for cause in found.causes
    ]
    return replace(found, causes=tuple(causes))


def _of_stage(own: StageRerun, local: Verdict, gradients: StageGradients, placement: Sequence[int]) -> Evidence:
    """Return the evidence about a stage by itself, like a model on one rank."""
    stage, whole, names = own.stage, own.expected, gradients.full_names
    observed = {(stage, name): gradients.observed[full] for name, full in names.items() if full in gradients.observed}
    own_gradients = gradients.parts(observed)
    given = tuple(replace(one, gradients=gradients.parts(one.gradients)) for one in whole.contributions)
    expected = gradients.parts({site: one for site, one in whole.gradients.items() if site in own_gradients})
    with drawing_apart():
        model, sites = deep_copy(own.model), [*expected]
        now = Traced(model, held=sites, batches=own.batches, loss=own.loss, losses=whole.losses, ends={})
    for name, leaf in now.parameters(stage).items():
        leaf.register_hook(partial(gradients.part, name))  # type: ignore[no-untyped-call]  # in torch
    begun = ((name, gradients.shards.in_place(full, gradients.begun.get(full))) for name, full in names.items())
    old = {(stage, name): one for name, one in begun if one is not None}
    alone, ranks, stages = (placement[stage],) * (stage + 1), len({*placement}), len(placement)
    update = Update(own_gradients, expected, now, old=old, placement=alone, ranks=ranks, stages=stages)
    known = RightStep(replace(whole, gradients=expected, contributions=given), whole.before, update)
    return Evidence(local, alone, len(own.batches), 1, gradients=own_gradients, norms=(), right=known)


def causes_of_sums(
    wrong: Mapping[str, tuple[Tensor, Tensor]], begun: Mapping[str, Tensor | None], rank: int, stage: int
) -> list[Cause]:
    """Find the one cause that explains all ``wrong`` gradients of a stage, each observed and as summed over replicas.

    ``begun``: their values before the step.
    """
    pairs = {name: (one - expected, begun.get(name)) for name, (one, expected) in wrong.items()}
    times = _one_of(None if old is None else sketch(rest).factor(sketch(old)) for rest, old in pairs.values())
    if times is not None:
        at = rank if times >= 1 else None  # for a part, another replica may have kept it
        return [Cause("stale-gradient", at, stage, detail=f"{STALE}, {times:g} times")]
    factor = _one_of(sketch(one).factor(sketch(expected)) for one, expected in wrong.values())
    if factor is None or is_near(factor, 1.0):
        return []
    alone = next(iter(wrong)) if len(wrong) == 1 else None
    return [Cause("scale", rank, stage, factor=factor, detail=f"{factor:g} times", parameter=alone)]


def _one_of(factors: Iterable[float | None]) -> float | None:
    """Return the common factor, to four digits; None if they differ, or one is None."""
    found = {None if one is None else float(f"{one:.4g}") for one in factors}
    return found.pop() if len(found) == 1 else None
