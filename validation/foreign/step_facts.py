"""What a diagnosis of a foreign step rests on: the broken laws, what its ranks handed back, and the reference."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from reference.data import Batch
from reference.step import Contribution, Expected, Gradient, Loss, Reference, Site
from reference.traced import Traced
from validation.diagnosis.attribution import Attribution, attribute
from validation.diagnosis.update import Update
from validation.foreign.assemble import Assembled
from validation.foreign.crossings import Passed
from validation.foreign.suspects import Suspects
from validation.judging.ledger import NOWHERE
from validation.judging.tolerance import scalar_error
from validation.judging.verdict import Verdict
from validation.observers.observed import Observed

_ALIKE = 1e-3  # no verdict hangs on it
_OF_GRADIENTS = ("gradient", "presence", "tied-copies")


@dataclass(frozen=True)
class StepFacts:
    """A failed verdict on a foreign step.

    ``model`` has the weights that the step began with; ``made`` is what the reference has of every microbatch;
    ``passed`` is what is known of the boundaries of watched stages.
    """

    verdict: Verdict
    observed: Observed
    found: Assembled
    reference: Reference
    model: nn.Module
    batches: Sequence[Batch]
    loss: Loss
    made: Sequence[Contribution]
    passed: Mapping[int, Passed]
    number: int = 0
    operation: str = "train"
    recording: None = None

    @property
    def stages(self) -> int:
        return len(self.found.stages)

    @property
    def microbatches(self) -> int:
        return len(self.batches)

    @property
    def ranks(self) -> int:
        return len(self.found.made)

    @property
    def unseen(self) -> frozenset[int]:
        """The stages of which nobody knows what they did, or for which microbatches."""
        return self.found.unseen | {stage for stage, flow in self.passed.items() if flow.untold}

    def rank_of(self, stage: int, microbatches: Sequence[int] = ()) -> int | None:
        """The rank of ``stage``; where several hold it, the one that these microbatches were on, if that is one."""
        members = [rank for rank, _ in self.found.stages[stage].part.members]
        if len(members) < 2:
            return self.observed.schedule.placement[stage]
        if self.found.replicas.count > 1:
            ran = {m: rank for rank in reversed(members) for m in self.found.replicas.share(rank)}
        else:
            ran = {m: r for m, r in self.passed[stage].ranks.items() if r is not None} if stage in self.passed else {}
        found = {ran.get(microbatch) for microbatch in microbatches}
        return found.pop() if len(found) == 1 else None

    @property
    def loss_factor(self) -> float | None:
        """How many times what it should be every loss is; None where that is not one number."""
        rows = [row[0] for row in self.observed.ranks]
        pairs = [
            (one, self.expected.losses[m]) for row in rows for m, one in zip(row.share or (), row.losses, strict=False)
        ]
        pairs += [(row.loss, self.expected.loss) for row in rows if row.loss is not None]
        ratios = [seen / due for seen, due in pairs if due]
        if not ratios or any(scalar_error(ratio, ratios[0]) > _ALIKE for ratio in ratios):
            return None
        return ratios[0]

    def differs(self, law: str) -> bool:
        """Whether ``law`` has a mismatch."""
        return any(mismatch.law == law for mismatch in self.verdict.mismatches)

    @cached_property
    def expected(self) -> Expected:
        """What the step must give, but for any update."""
        orders = dict.fromkeys({stage for stage, _ in self.made[0].gradients}, range(self.microbatches))
        return self.reference.before_update(self.batches, self.made, orders=orders)

    @cached_property
    def suspects(self) -> Suspects:
        """What may have gone wrong between ranks that have a stage in common."""
        norms = [row[0].norm for row in self.observed.ranks]
        return Suspects(self.found.stages, self.found.replicas, self.made, norms)

    @cached_property
    def attribution(self) -> Attribution | None:
        """What the gradients are made of; None where they are right."""
        if not any(map(self.differs, _OF_GRADIENTS)):
            return None
        return attribute(self.update)

    @cached_property
    def update(self) -> Update:
        """The step as attribution sees it."""
        apart = [{s: name for s, name in copies.items() if s != NOWHERE} for copies in self.found.tied]
        return Update(
            self.observed.gradients(0),
            self._due,
            self.traced,
            tied=[copies for copies in apart if len(copies) > 1],
            placement=self.observed.schedule.placement,
            ranks=self.ranks // self.found.replicas.count,
            replicas=self.found.replicas.count,
        )

    @cached_property
    def traced(self) -> Traced:
        """The reference, in the stages that were handed back."""
        return Traced(
            self.model,
            held=self._due.keys(),
            batches=self.batches,
            loss=self.loss,
            losses=[one.loss for one in self.made],
            ends={stage: flow.ends.values() for stage, flow in self.passed.items()},
        )

    @property
    def unexplained(self) -> tuple[str, ...]:
        """What attribution says of gradients that it finds nothing for, and what it could not try."""
        if self.attribution is None or not self.attribution.unknown:
            return ()
        return tuple(filter(None, (*self.attribution.unknown, self.traced.unpaired)))

    @cached_property
    def _due(self) -> Mapping[Site, Gradient]:
        gradients = self.expected.gradients
        return {site: gradients[site] for site in sorted(self.found.due) if site[0] != NOWHERE}
