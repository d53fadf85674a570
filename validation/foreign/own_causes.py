"""What is wrong with a stage's gradients, as the rank finds out that has the stage: what they are made of."""

import math
from collections.abc import Mapping, Sequence
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
from pipeproof.foreign.first_run import DRAWS_AGAIN
from pipeproof.foreign.own_links import OwnStage
from pipeproof.reference.copied import copied
from pipeproof.reference.step import Expected, Site, dense
from pipeproof.reference.traced import Traced
from pipeproof.worlds.drawing import drawing_apart

_ALONG = 0.9999  # the cosine from which on a gradient leads nowhere else


def own_causes(
    own: OwnStage,
    ledger: Ledger,
    numbers: Sequence[int],
    seen: Mapping[str, Any],
    names: Mapping[str, str],
    begun: Mapping[str, Tensor | None],
    *,
    placement: Sequence[int],
) -> Verdict:
    """A verdict on the gradients of ``own`` alone, with the causes of what is wrong with them.

    ``ledger`` has what was found wrong; ``numbers``: the microbatch of each of its calls; ``seen``: gradients by the
    model's names, of which ``names`` has those of the stage. ``begun``: what these were before the step. ``placement``:
    the rank of every stage.
    """
    rank = placement[own.stage]
    local = concluded(ledger, f"stage {own.stage}")
    full_name = {name: full for full, name in names.items()}
    wrong = [one for one in local.mismatches if one.stage == own.stage and one.parameter in names]
    mismatches = tuple(replace(one, parameter=names[str(one.parameter)]) for one in wrong)
    local = replace(local, mismatches=mismatches)
    if local.verdict == "unknown" and (times := _one_multiple(mismatches)) is not None:
        alone = wrong[0].parameter if len(wrong) == 1 else None
        detail = f"about {times:.3g} times"
        return replace(local, cause=(Cause("scale", rank, own.stage, parameter=alone, factor=times, detail=detail),))
    due = _OwnDue(own, seen, names, begun, placement)
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
    if not causes and own.first_run.draws_again:
        causes = [Cause("randomness", rank, own.stage, detail=DRAWS_AGAIN)]
        found = replace(found, undecided=())
    return replace(found, cause=tuple(causes))


def _one_multiple(wrong: Sequence[Mismatch]) -> float | None:
    """How many times what is due all is that may be wrong; None if not one multiple.

    So little is not told apart by microbatches: what rounding does to each is as large.
    """
    sizes = [one.found for one in wrong if one.law == "gradient" and isinstance(one.found, Size)]
    if not sizes or len(sizes) < len(wrong) or any((one.cosine or 0.0) < _ALONG for one in sizes):
        return None
    times = median(one.factor or math.nan for one in sizes)
    return times if all(near(one.factor, times) for one in sizes) else None


@dataclass(frozen=True)
class _OwnDue:
    """What one stage must give, as a model of its own."""

    own: OwnStage
    seen: Mapping[str, Any]
    names: Mapping[str, str]
    begun: Mapping[str, Tensor | None]
    placement: Sequence[int]

    @cached_property
    def gradients(self) -> dict[Site, Tensor | None]:
        """Those that were seen."""
        seen, own = self.seen, self.own.stage
        return _dense({(own, name): seen[full] for full, name in self.names.items() if full in seen})

    @cached_property
    def expected(self) -> Expected:
        due = self.own.expected
        kept = {site: one for site, one in due.gradients.items() if site in self.gradients}
        given = tuple(replace(one, gradients=_dense(one.gradients)) for one in due.contributions)
        return replace(due, gradients=_dense(kept), contributions=given)

    @cached_property
    def update(self) -> Update:
        with drawing_apart():
            now = Traced(
                copied(self.own.model),
                held=list(self.expected.gradients),
                batches=self.own.batches,
                loss=self.own.loss,
                losses=self.expected.losses,
                ends={},
            )
        alone = (self.placement[self.own.stage],) * (self.own.stage + 1)
        old = {(self.own.stage, self.names[full]): one for full, one in self.begun.items() if one is not None}
        ranks, stages = len({*self.placement}), len(self.placement)
        both = self.gradients, self.expected.gradients
        given = self.expected.contributions
        return Update(*both, now, old=old, placement=alone, ranks=ranks, stages=stages, given=given)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        return self.expected.before


def _dense(gradients: Mapping[Site, Tensor | None]) -> dict[Site, Tensor | None]:
    """``gradients`` with all their elements, of which causes are made."""
    return {site: None if one is None else dense(one) for site, one in gradients.items()}
