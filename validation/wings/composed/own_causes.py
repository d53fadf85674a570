"""What is wrong with a stage's gradients, as the rank finds out that has the stage: what they are made of."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

from torch import Tensor

from pipeproof.core.cause import Cause
from pipeproof.core.judge import concluded
from pipeproof.core.ledger import Ledger
from pipeproof.core.mismatch import Mismatch, Size
from pipeproof.core.verdict import Verdict
from pipeproof.diagnosis.atoms import Update
from pipeproof.diagnosis.diagnose import explained, sought
from pipeproof.diagnosis.evidence import Evidence
from pipeproof.diagnosis.naming import STALE
from pipeproof.foreign.crossings import near
from pipeproof.observers.sketch import sketch
from pipeproof.pipeline.sizes import first_few
from pipeproof.reference.copied import copied
from pipeproof.reference.step import Expected, Gradient, Site, dense
from pipeproof.reference.traced import Traced
from pipeproof.wings.composed.rerun import StageRerun
from pipeproof.wings.composed.sums import ReplicaSums
from pipeproof.worlds.drawing import drawing_apart

_ALONG = 0.9999  # the cosine from which on a gradient leads nowhere else


@dataclass(frozen=True)
class HeldGradients:
    """The gradients of one stage that a rank holds, by the model's names.

    ``names``: what the stage calls each. ``begun``: what they were before the step. ``part``: of a whole gradient, what
    the rank holds of it, in its place, with zeros around it. All are so: of what others hold, it has seen nothing.
    """

    seen: Mapping[str, Tensor | None]
    names: Mapping[str, str]
    begun: Mapping[str, Tensor | None]
    part: Callable[[str, Gradient], Gradient]


@dataclass(frozen=True)
class _Due:
    """What one stage must give, as a model of its own."""

    expected: Expected
    weights: Mapping[str, Tensor]
    update: Update


def own_causes(
    own: StageRerun, ledger: Ledger, numbers: Sequence[int], held: HeldGradients, *, placement: Sequence[int]
) -> Verdict:
    """A verdict on the gradients of ``own`` that a rank has ``held``, with the causes of what is wrong with them.

    ``ledger`` has what was found wrong; ``numbers``: the microbatch of each of its calls; ``placement``: the rank of
    every stage.
    """
    local, rank = concluded(ledger, f"stage {own.stage}"), placement[own.stage]
    wrong = tuple(one for one in local.mismatches if one.stage == own.stage and one.parameter in held.names)
    local = replace(local, mismatches=wrong)
    if local.verdict == "unknown" and (times := _one_multiple(wrong)) is not None:
        alone = wrong[0].parameter if len(wrong) == 1 else None
        detail = f"about {times:.6g} times"
        return replace(local, cause=(Cause("scale", rank, own.stage, parameter=alone, factor=times, detail=detail),))
    found = sought(local, lambda: explained(_evidence(own, local, held, placement)))
    batches, full_names = [numbers[k] for k in own.numbers], {name: full for full, name in held.names.items()}
    causes = [
        replace(
            cause,
            rank=rank,
            stage=own.stage,
            microbatches=tuple(sorted(batches[m] for m in cause.microbatches)),
            parameter=None if cause.parameter is None else full_names.get(cause.parameter, cause.parameter),
        )
        for cause in found.cause
    ]
    return replace(found, cause=tuple(causes))


def _one_multiple(wrong: Sequence[Mismatch]) -> float | None:
    """How many times what is due all is that may be wrong; None if not one multiple.

    So little is not told apart by microbatches: what rounding does to each is as large.
    """
    sizes = [one.found for one in wrong if one.law == "gradient" and isinstance(one.found, Size)]
    if not sizes or len(sizes) < len(wrong) or any((one.cosine or 0.0) < _ALONG for one in sizes):
        return None
    times = median(one.factor or math.nan for one in sizes)
    beside = max(math.sqrt(max(0.0, 2 - 2 * (one.cosine or 0.0))) for one in sizes)  # of it, what is no multiple
    return times if 2 * abs(times - 1) >= beside and all(near(one.factor, times) for one in sizes) else None


def _evidence(own: StageRerun, local: Verdict, held: HeldGradients, placement: Sequence[int]) -> Evidence:
    """What is known of a stage by itself, as a model of its own that is all on one rank."""
    stage, whole = own.stage, own.expected
    full_names = {name: full for full, name in held.names.items()}

    def part(name: str, one: Gradient) -> Gradient:
        return held.part(full_names[name], one) if name in full_names else one

    def parts(gradients: Mapping[Site, Gradient]) -> dict[Site, Gradient]:
        return {(at, name): None if one is None else part(name, dense(one)) for (at, name), one in gradients.items()}

    seen = {(stage, held.names[full]): None if one is None else dense(one) for full, one in held.seen.items()}
    due = {site: one for site, one in whole.gradients.items() if site in seen}
    given = tuple(replace(one, gradients=parts(one.gradients)) for one in whole.contributions)
    expected = replace(whole, gradients=parts(due), contributions=given)
    sites = list(expected.gradients)
    with drawing_apart():
        now = Traced(copied(own.model), held=sites, batches=own.batches, loss=own.loss, losses=whole.losses, ends={})
    for name, leaf in now.parameters(stage).items():
        leaf.register_hook(partial(part, name))  # type: ignore[no-untyped-call]  # in torch
    old = {(stage, held.names[full]): one for full, one in held.begun.items() if one is not None}
    alone, ranks, stages = (placement[stage],) * (stage + 1), len({*placement}), len(placement)
    both = seen, expected.gradients
    update = Update(*both, now, old=old, placement=alone, ranks=ranks, stages=stages, given=expected.contributions)
    known = _Due(expected, whole.before, update)
    return Evidence(local, alone, len(own.batches), 1, gradients=seen, norms=(), due=known)


def causes_of_sums(
    sums: ReplicaSums,
    stage: int,
    wrong: Mapping[str, tuple[Tensor, Tensor]],
    begun: Mapping[str, Tensor | None],
    scale: float,
) -> list[Cause]:
    """What is wrong with all gradients of a stage that are ``wrong``, as observed and as expected: one thing.

    ``begun``: what they were before the step. All are as they are before ``sums`` over replicas are divided by
    ``scale``.
    """
    part = sums.own.part
    wrong = {name: (part(name, one), part(name, due)) for name, (one, due) in wrong.items()}
    at = Cause("not-reduced", rank=sums.exchange.rank, stage=stage)
    seen = {name: sketch(one) for name, (one, _) in wrong.items()}
    own = [seen[name].factor(sums.alone[name]) if name in sums.alone else None for name in wrong]
    if all(near(one, 1.0) or near(one, scale) for one in own):
        return [
            replace(at, detail=f"its gradients of {first_few(list(wrong))} are those of its own microbatches alone")
        ]
    times = _one_of(_besides(*pair, begun.get(name)) for name, pair in wrong.items())
    if times is not None:
        rank = at.rank if times >= 1 else None  # of less than all of it, another replica may have kept it
        return [replace(at, kind="stale-gradient", rank=rank, detail=f"{STALE}, {times:g} times")]
    factor = _one_of(seen[name].factor(sketch(due)) for name, (_, due) in wrong.items())
    if factor is None or near(factor, 1.0):
        return []
    alone = next(iter(wrong)) if len(wrong) == 1 else None
    return [replace(at, kind="scale", factor=factor, detail=f"{factor:g} times", parameter=alone)]


def _besides(observed: Tensor, expected: Tensor, begun: Tensor | None) -> float | None:
    """How many times what was there as the step ``begun`` is in what is ``observed``, besides the expected."""
    if begun is None or observed.shape != expected.shape or observed.numel() != begun.numel():
        return None
    return sketch(observed - expected).factor(sketch(begun.to(observed).view_as(observed)))


def _one_of(factors: Iterable[float | None]) -> float | None:
    """The one factor that all are, to four digits; None where they differ, or one is none."""
    found = {None if one is None else float(f"{one:.4g}") for one in factors}
    return found.pop() if len(found) == 1 else None
