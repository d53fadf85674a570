"""What the explanation of a foreign step rests on: what its ranks handed back, and the reference beside it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile

import torch
from torch import Tensor, nn

from pipeproof.core.ledger import NOWHERE
from pipeproof.core.old_weights import Given, StaleCall
from pipeproof.core.verdict import Verdict
from pipeproof.explain.atoms import Update
from pipeproof.explain.evidence import Evidence, Line
from pipeproof.explain.members import Members
from pipeproof.explain.model_beside import ModelBeside
from pipeproof.foreign.assemble import Assembled
from pipeproof.foreign.operation_run import OperationRun
from pipeproof.foreign.survey import Computed
from pipeproof.observers.observed import Observed, Passed
from pipeproof.observers.sketch import Sketch
from pipeproof.reference.copied import copied
from pipeproof.reference.data import Batch
from pipeproof.reference.step import Contribution, Expected, Gradient, Loss, Reference, Site
from pipeproof.reference.traced import Traced


@dataclass(frozen=True)
class Beside:
    """The reference, once it was run.

    ``model`` has the weights that the step began with; ``made`` is what the reference has of every microbatch.
    ``before``: the operations before ``now``, the latest first.
    """

    reference: Reference
    model: nn.Module
    batches: Sequence[Batch]
    loss: Loss
    made: Sequence[Contribution]
    before: tuple[OperationRun, ...] = ()
    now: OperationRun | None = None

    @staticmethod
    def of(one: OperationRun, model: nn.Module, before: Sequence[OperationRun] = ()) -> "Beside":
        """The reference of one operation; ``model`` is another of its own. Each loss is divided before its backward."""
        run, found = one.run, one.found
        reference = run.reference(found.owner, found.copies, accumulation=one.accumulation)
        return Beside(reference, model, run.batches, one.task.loss, run.made(found.owner), tuple(before), one)

    @property
    def pending(self) -> list[OperationRun]:
        """The operations before that added to the gradients that the next update uses."""
        since = takewhile(lambda one: one.found.name != "train", self.before)
        return [one for one in since if one.found.name == "accumulate"]


def evidence_of(verdict: Verdict, lines: Sequence[Line], found: Assembled, beside: Beside) -> Evidence:
    """All that is known of a step; of the ``lines`` of its ranks, what the first did is looked at first."""
    observed, passed = lines[0].seen, lines[0].passed
    norms = [row[0].norm for row in observed.ranks]
    due = _RightStep(observed, found, beside, passed)
    return Evidence(
        verdict,
        observed.schedule.placement,
        len(beside.batches),
        len(found.made),
        operation=found.name,
        gradients=observed.gradients(0),
        norms=norms,
        due=due,
        beside=due.model,
        seen=observed,
        passed=passed,
        others=tuple(lines[1:]),
        stale=tuple(_stale(found, beside)),
        earlier_weights=[one.run.weights for one in beside.before],
        with_weights=due.with_weights,
        clipped_to=found.max_norm,
        scale=found.loss_scale,
        members=Members(found.stages, found.replicas, lambda: beside.made, norms),
        told=found.traced,
        unseen=found.unseen | {stage for stage, flow in passed.items() if flow.untold},
        frozen=found.frozen,
        strange=bool(found.unmatched),
        renamed_by="names=",
    )


def _stale(found: Assembled, beside: Beside) -> Iterator[StaleCall]:
    """The calls of watched stages that were given what an operation before had, and this one has nowhere."""
    earlier = [*enumerate(reversed(beside.before), start=1)]
    for stage in found.stages if earlier else ():
        for number, call in enumerate(stage.part.calls or (), start=1):
            for seen in (one for one in call.inputs if not _places(beside.now, one)):
                every = ((operation, _places(one, seen)) for operation, one in earlier)
                yield from (StaleCall(stage.index, number, k, places[0][1]) for k, places in every if places)


def _places(one: OperationRun | None, seen: Sketch) -> Sequence[tuple[str, int]]:
    """Where in the reference's ``one`` the very tensor ``seen`` passes."""
    return () if one is None or one.run.places is None else one.run.places[0].holding(seen)


@dataclass(frozen=True)
class _RightStep:
    """What the step must give."""

    observed: Observed
    found: Assembled
    beside: Beside
    passed: Mapping[int, Passed]

    @cached_property
    def expected(self) -> Expected:
        """All, but for any update."""
        return self._whole(self.beside.reference, self.beside.made, lambda one: one.run.made(one.found.owner), {})

    def _whole(
        self,
        reference: Reference,
        made: Sequence[Contribution],
        earlier: Callable[[OperationRun], Sequence[Contribution]],
        ran: Mapping[int, Sequence[int]],
    ) -> Expected:
        """What the microbatches ``made``, and those of ``earlier`` operations; where stages ran all, in that order."""
        stages = {stage for stage, _ in (*made[0].gradients, *self.found.copies)}

        def orders(count: int) -> Mapping[int, Sequence[int]]:
            every = range(count)
            return {stage: ran[stage] if sorted(ran.get(stage, ())) == [*every] else every for stage in stages}

        sums: Mapping[Site, Gradient] = {}
        for one in reversed(self.beside.pending):
            parts = earlier(one)
            sums = reference.accumulate(parts, orders=orders(len(parts)), onto=sums, by=one.accumulation)
        return reference.before_update(self.beside.batches, made, orders=orders(len(made)), onto=sums)

    @cached_property
    def update(self) -> Update:
        """The step as attribution sees it."""
        apart = [{s: name for s, name in copies.items() if s != NOWHERE} for copies in self.found.tied]
        earlier = self.beside.pending
        return Update(
            self.observed.gradients(0),
            self._held,
            self._traced,
            tuple(map(self._traced_of, earlier)),
            old=(self.beside.pending[-1].found if earlier else self.found).begun,
            tied=[copies for copies in apart if len(copies) > 1],
            placement=self.observed.schedule.placement,
            ranks=len(self.found.made) // self.found.replicas.count,
            replicas=self.found.replicas.count,
            computed_in=lambda: None if self.beside.now is None else self.beside.now.run.computed_in,
        )

    @cached_property
    def weights(self) -> Mapping[str, Tensor]:
        return {name: p.detach().cpu() for name, p in self.beside.model.named_parameters(remove_duplicate=False)}

    @cached_property
    def model(self) -> ModelBeside:
        """The reference that plays single microbatches."""
        one = self.beside
        return ModelBeside(one.reference, one.model, one.batches, one.loss, lambda: self._traced, lacks=self._lacks)

    def with_weights(self, weights: Mapping[str, Tensor]) -> Given | None:
        """What the step gives with these weights in place of its own; None where that does not run."""
        model, now = copied(self.beside.model), self.beside.now
        with torch.no_grad():
            for name, weight in weights.items():
                model.get_parameter(name).copy_(weight)
        reference = (self.beside.reference if now is None else now.reference).of(model)
        try:
            made = [*reference.contributing(self.beside.batches)]
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None
        whole = self._whole(reference, made, lambda one: one.made, self.observed.backwards(0))
        return Given(whole.losses, whole.loss, {name: one for (_, name), one in whole.gradients.items()})

    def _lacks(self, microbatch: int, seen: Sketch) -> bool:
        """Whether the reference computes no such tensor for a microbatch, and nothing that it was made of."""
        return self._computed[microbatch].lacks(seen)

    @cached_property
    def _computed(self) -> Sequence[Computed]:
        """What the reference computes for every microbatch."""
        model = copied(self.beside.model)
        found = []
        for batch in self.beside.batches:
            with Computed() as computed:
                batch.through(model)
            found.append(computed)
        return found

    @cached_property
    def _traced(self) -> Traced:
        """The reference, in the stages that were handed back."""
        return Traced(
            self.beside.model,
            held=self._held.keys(),
            batches=self.beside.batches,
            loss=self.beside.loss,
            losses=[one.loss for one in self.beside.made],
            ends={stage: flow.ends.values() for stage, flow in self.passed.items()},
        )

    def _traced_of(self, one: OperationRun) -> Traced:
        """An operation before, from the same weights, in the same stages."""
        losses = [made.loss for made in one.run.made(one.found.owner)]
        held, batches, loss = self._held.keys(), one.run.batches, one.task.loss
        return Traced(self.beside.model, held=held, batches=batches, loss=loss, losses=losses, ends={})

    @cached_property
    def _held(self) -> Mapping[Site, Gradient]:
        gradients = self.expected.gradients
        return {site: gradients[site] for site in sorted(self.found.due) if site[0] != NOWHERE}
