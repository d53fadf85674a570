"""What is wrong with a stage's gradients, as the rank finds out that has the stage: what they are made of."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from pipeproof.core.cause import Cause
from pipeproof.core.judge import concluded
from pipeproof.core.ledger import Ledger
from pipeproof.core.verdict import Verdict
from pipeproof.explain.atoms import Update
from pipeproof.explain.cause_rules import STALE
from pipeproof.explain.evidence import Evidence
from pipeproof.explain.explain import explained, sought
from pipeproof.foreign.crossings import near
from pipeproof.observers.sketch import sketch
from pipeproof.reference.copied import copied
from pipeproof.reference.step import Expected, Gradient, Site, dense
from pipeproof.reference.traced import Traced
from pipeproof.wings.composed.collect import Begun
from pipeproof.wings.composed.rerun import StageRerun
from pipeproof.wings.composed.shards import OwnShards
from pipeproof.worlds.drawing import drawing_apart


@dataclass(frozen=True)
class HeldGradients:
    """The gradients of one stage that a rank holds, by the model's names.

    ``full_names``: by what the stage calls each. ``begun``: what they were before the step. Of what other ranks hold of
    one, by ``shards``, this one has seen nothing: it is zero here.
    """

    full_names: Mapping[str, str]
    seen: Mapping[str, Tensor | None]
    begun: Begun
    shards: OwnShards

    def part(self, name: str, whole: Gradient) -> Gradient:
        """A ``whole`` gradient, by its name in the stage, with zeros in place of what others hold."""
        return self.shards.alone(self.full_names[name], whole) if name in self.full_names else whole

    def parts(self, whole: Mapping[Site, Gradient]) -> dict[Site, Gradient]:
        """The same of all of them, with all their elements."""
        return {
            (stage, name): None if one is None else self.part(name, dense(one)) for (stage, name), one in whole.items()
        }


@dataclass(frozen=True)
class RightStep:
    """What is known of the right step; of a chain not what gradients are made of, which ranks find out."""

    expected: Expected
    weights: Mapping[str, Tensor]
    made: Update | None = None

    @property
    def update(self) -> Update:
        assert self.made is not None, "no gradients are there to be explained"
        return self.made


def own_causes(
    own: StageRerun, ledger: Ledger, numbers: Sequence[int], held: HeldGradients, *, placement: Sequence[int]
) -> Verdict:
    """A verdict on the gradients of ``own`` that a rank has ``held``, with the causes of what is wrong with them.

    ``ledger`` has what was found wrong; ``numbers``: the microbatch of each of its calls; ``placement``: the rank of
    every stage. What little is unknown is not told apart by microbatches: what rounding does to each is as large.
    """
    local, names = concluded(ledger, f"stage {own.stage}"), held.full_names
    wrong = [one for one in local.mismatches if one.stage == own.stage and one.parameter in names.values()]
    local = replace(local, mismatches=tuple(wrong))
    if local.verdict == "unknown":
        return local
    found = sought(local, lambda: explained(_evidence(own, local, held, placement)))
    batches = [numbers[k] for k in own.numbers]
    causes = [
        replace(
            cause,
            rank=placement[own.stage],
            stage=own.stage,
            microbatches=tuple(sorted(batches[m] for m in cause.microbatches)),
            parameter=None if cause.parameter is None else names.get(cause.parameter, cause.parameter),
        )
        for cause in found.cause
    ]
    return replace(found, cause=tuple(causes))


def _evidence(own: StageRerun, local: Verdict, held: HeldGradients, placement: Sequence[int]) -> Evidence:
    """What is known of a stage by itself, as a model of its own that is all on one rank."""
    stage, whole, names = own.stage, own.expected, held.full_names
    seen = held.parts({(stage, name): held.seen[full] for name, full in names.items() if full in held.seen})
    given = tuple(replace(one, gradients=held.parts(one.gradients)) for one in whole.contributions)
    due = held.parts({site: one for site, one in whole.gradients.items() if site in seen})
    with drawing_apart():
        now = Traced(copied(own.model), held=[*due], batches=own.batches, loss=own.loss, losses=whole.losses, ends={})
    for name, leaf in now.parameters(stage).items():
        leaf.register_hook(partial(held.part, name))  # type: ignore[no-untyped-call]  # in torch
    begun = {(stage, name): held.shards.in_place(full, held.begun.get(full)) for name, full in names.items()}
    old = {site: one for site, one in begun.items() if one is not None}
    alone, ranks, stages = (placement[stage],) * (stage + 1), len({*placement}), len(placement)
    update = Update(seen, due, now, old=old, placement=alone, ranks=ranks, stages=stages)
    known = RightStep(replace(whole, gradients=due, contributions=given), whole.before, update)
    return Evidence(local, alone, len(own.batches), 1, gradients=seen, norms=(), due=known)


def causes_of_sums(
    wrong: Mapping[str, tuple[Tensor, Tensor]], begun: Mapping[str, Tensor | None], rank: int, stage: int
) -> list[Cause]:
    """What all gradients of a stage are that are ``wrong``, as observed and as replicas add them up: one thing.

    ``begun``: what they were before the step.
    """
    pairs = {name: (one - due, begun.get(name)) for name, (one, due) in wrong.items()}
    times = _one_of(None if old is None else sketch(rest).factor(sketch(old)) for rest, old in pairs.values())
    if times is not None:
        at = rank if times >= 1 else None  # of less than all of it, another replica may have kept it
        return [Cause("stale-gradient", at, stage, detail=f"{STALE}, {times:g} times")]
    factor = _one_of(sketch(one).factor(sketch(due)) for one, due in wrong.values())
    if factor is None or near(factor, 1.0):
        return []
    alone = next(iter(wrong)) if len(wrong) == 1 else None
    return [Cause("scale", rank, stage, factor=factor, detail=f"{factor:g} times", parameter=alone)]


def _one_of(factors: Iterable[float | None]) -> float | None:
    """The one factor that all are, to four digits; None where they differ, or one is none."""
    found = {None if one is None else float(f"{one:.4g}") for one in factors}
    return found.pop() if len(found) == 1 else None
