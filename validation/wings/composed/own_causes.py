"""What is wrong with a stage's gradients, as the rank finds out that has the stage: what they are made of."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median
from typing import Any

from torch import Tensor

from pipeproof.core.cause import Cause
from pipeproof.core.judge import concluded
from pipeproof.core.ledger import Ledger
from pipeproof.core.mismatch import Mismatch, Size
from pipeproof.core.verdict import Verdict
from pipeproof.diagnosis.atoms import Update
from pipeproof.diagnosis.diagnose import explained, sought
from pipeproof.diagnosis.evidence import Evidence
from pipeproof.foreign.crossings import near
from pipeproof.reference.copied import copied
from pipeproof.reference.pairing import Contributed, Flow
from pipeproof.reference.step import Expected, Gradient, Site, dense
from pipeproof.reference.traced import Traced
from pipeproof.wings.composed.rerun import StageRerun
from pipeproof.worlds.drawing import drawing_apart

_ALONG = 0.9999  # the cosine from which on a gradient leads nowhere else


@dataclass(frozen=True)
class HeldGradients:
    """The gradients of one stage that a rank holds, by the model's names.

    ``names``: what the stage calls each. ``begun``: what they were before the step. ``part``: of a whole gradient, what
    the rank holds of it, in its place, with zeros around it. All are so: of what others hold, it has seen nothing.
    """

    seen: Mapping[str, Any]
    names: Mapping[str, str]
    begun: Mapping[str, Tensor | None]
    part: Callable[[str, Gradient], Gradient] = lambda _, whole: whole


def own_causes(
    own: StageRerun, ledger: Ledger, numbers: Sequence[int], held: HeldGradients, *, placement: Sequence[int]
) -> Verdict:
    """A verdict on the gradients of ``own`` that a rank has ``held``, with the causes of what is wrong with them.

    ``ledger`` has what was found wrong; ``numbers``: the microbatch of each of its calls; ``placement``: the rank of
    every stage.
    """
    rank, names = placement[own.stage], held.names
    local = concluded(ledger, f"stage {own.stage}")
    full_name = {name: full for full, name in names.items()}
    wrong = [one for one in local.mismatches if one.stage == own.stage and one.parameter in names]
    mismatches = tuple(replace(one, parameter=names[str(one.parameter)]) for one in wrong)
    local = replace(local, mismatches=mismatches)
    if local.verdict == "unknown" and (times := _one_multiple(mismatches)) is not None:
        alone = wrong[0].parameter if len(wrong) == 1 else None
        detail = f"about {times:.6g} times"
        return replace(local, cause=(Cause("scale", rank, own.stage, parameter=alone, factor=times, detail=detail),))
    due = _OwnDue(own, held, placement)
    batches = [numbers[k] for k in own.numbers]
    evidence = Evidence(local, (rank,) * (own.stage + 1), len(batches), 1, gradients=due.gradients, norms=(), due=due)
    found = sought(local, lambda: explained(evidence))
    causes = [
        replace(
            cause,
            rank=rank,
            stage=own.stage,
            microbatches=tuple(sorted(batches[m] for m in cause.microbatches)),
            parameter=None if cause.parameter is None else full_name.get(cause.parameter, cause.parameter),
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


@dataclass(frozen=True)
class _OwnDue:
    """What one stage must give, as a model of its own."""

    own: StageRerun
    held: HeldGradients
    placement: Sequence[int]

    @cached_property
    def gradients(self) -> dict[Site, Gradient]:
        """Those that were seen."""
        own, names = self.own.stage, self.held.names
        return {(own, names[full]): _dense(self.held.seen[full]) for full in names if full in self.held.seen}

    @cached_property
    def expected(self) -> Expected:
        due = self.own.expected
        kept = {site: one for site, one in due.gradients.items() if site in self.gradients}
        given = tuple(replace(one, gradients=self._in_parts(one.gradients)) for one in due.contributions)
        return replace(due, gradients=self._in_parts(kept), contributions=given)

    @cached_property
    def update(self) -> Update:
        with drawing_apart():
            now = _TracedParts(
                copied(self.own.model),
                held=list(self.expected.gradients),
                batches=self.own.batches,
                loss=self.own.loss,
                losses=self.expected.losses,
                ends={},
            )
        now.part = self._part
        alone = (self.placement[self.own.stage],) * (self.own.stage + 1)
        begun, names = self.held.begun, self.held.names
        old = {(self.own.stage, names[full]): one for full, one in begun.items() if one is not None}
        ranks, stages = len({*self.placement}), len(self.placement)
        both = self.gradients, self.expected.gradients
        given = self.expected.contributions
        return Update(*both, now, old=old, placement=alone, ranks=ranks, stages=stages, given=given)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self.expected.before

    @cached_property
    def _full_names(self) -> dict[str, str]:
        return {name: full for full, name in self.held.names.items()}

    def _part(self, name: str, whole: Gradient) -> Gradient:
        full = self._full_names.get(name)
        return whole if full is None else self.held.part(full, whole)

    def _in_parts(self, gradients: Mapping[Site, Gradient]) -> dict[Site, Gradient]:
        return {(stage, name): self._part(name, _dense(one)) for (stage, name), one in gradients.items()}


class _TracedParts(Traced):
    """What every pairing gives of the ``part`` of each gradient that a rank holds."""

    part: Callable[[str, Gradient], Gradient]

    def contribution(self, stage: int, j: int) -> Contributed:
        return self._of_part(super().contribution(stage, j))

    def paired(self, stage: int, i: int, flows: Sequence[Flow]) -> list[Contributed | None]:
        return [None if one is None else self._of_part(one) for one in super().paired(stage, i, flows)]

    def within(self, stage: int, name: str) -> Mapping[tuple[int, int], Tensor]:
        found = {pair: self.part(name, one) for pair, one in super().within(stage, name).items()}
        return {pair: one for pair, one in found.items() if one is not None}

    def _of_part(self, given: Contributed) -> Contributed:
        return replace(given, gradients={name: self.part(name, one) for name, one in given.gradients.items()})


def _dense(gradient: Gradient) -> Gradient:
    """``gradient`` with all its elements, of which causes are made."""
    return None if gradient is None else dense(gradient)
