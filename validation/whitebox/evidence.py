"""What the explanation of a foreign step rests on: what its ranks handed back, and the reference beside it."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile

import torch
from torch import Tensor, nn

from pipeproof.core.execution import flow
from pipeproof.core.ledger import NOWHERE
from pipeproof.core.observe.observed import Crossing
from pipeproof.core.observe.sketch import Sketch
from pipeproof.core.old_weights import Given, StaleCall, hold_to_old_weights
from pipeproof.core.verdict import Verdict
from pipeproof.explain.atoms import Update
from pipeproof.explain.evidence import Evidence, Line
from pipeproof.explain.explain import explained, sought
from pipeproof.explain.members import Members
from pipeproof.explain.model_beside import ModelBeside
from pipeproof.reference.copied import copied
from pipeproof.reference.step import Contribution, Expected, Gradient, Reference, Site
from pipeproof.reference.traced import Traced
from pipeproof.whitebox.operation_run import OperationRun
from pipeproof.whitebox.survey import Computed

_BY_DESIGN = ("zero", "missing", "shape")  # one rank of a line may have the loss, or hand on a part, for all


def explain(verdict: Verdict, now: OperationRun, model: nn.Module, before: Sequence[OperationRun]) -> Verdict:
    """``verdict`` with its cause, looked for in the operation that disagrees first.

    ``model``: another reference, with the weights that it began with. ``before``: earlier operations, the latest first.
    """
    known = now.passages(undivided=True)
    if now.run.crash is not None:
        return verdict.without_cause(now.run.crash)
    observed = now.found.observed(known)
    lines = [Line(observed.along(number), flows) for number, flows in enumerate(known)]
    along = sorted(lines, key=lambda line: _first_wrong(line, first=line is lines[0]))
    evidence = _RightStep(now, model, tuple(before), along[0]).evidence(verdict, along[1:])
    verdict = hold_to_old_weights(verdict, lambda: evidence)
    evidence = replace(evidence, verdict=verdict)
    return sought(verdict, lambda: explained(evidence))


def _first_wrong(line: Line, *, first: bool) -> tuple[float, ...]:
    """Where in the flow a tensor is first wrong. On lines after the ``first``, what no law judges may be meant so."""
    wrong = [one for one in line.seen.crossings(0) if not one.same and (first or one.judged or not _meant(one))]
    return min((flow(one, line.seen.schedule.n_stages) for one in wrong), default=(float("inf"),))


def _meant(one: Crossing) -> bool:
    return one.really is None or one.really.kind in _BY_DESIGN


def _places(one: OperationRun, observed: Sketch) -> Sequence[tuple[str, int]]:
    """Where in the reference of operation ``one`` the very tensor ``observed`` passes."""
    return () if one.run.places is None else one.run.places[0].holding(observed)


@dataclass(frozen=True)
class _RightStep:
    """What operation ``now`` must give, by the reference ``model``, whose weights are those that it began with.

    ``before``: the operations before it, the latest first. ``line``: what its ranks did.
    """

    now: OperationRun
    model: nn.Module
    before: tuple[OperationRun, ...]
    line: Line

    def evidence(self, verdict: Verdict, others: Sequence[Line]) -> Evidence:
        """All that is known of the step; ``others``: what further lines of ranks did."""
        found, observed, passed = self.now.found, self.line.seen, self.line.passed
        norms = [row[0].norm for row in observed.ranks]
        return Evidence(
            verdict,
            observed.schedule.placement,
            len(self.now.run.batches),
            len(found.made),
            operation=found.name,
            gradients=observed.gradients(0),
            norms=norms,
            due=self,
            beside=self.beside,
            seen=observed,
            passed=passed,
            others=tuple(others),
            stale=tuple(self._stale()),
            earlier_weights=[one.run.weights for one in self.before],
            with_weights=self.with_weights,
            clipped_to=found.max_norm,
            scale=found.loss_scale,
            members=Members(found.stages, found.replicas, lambda: self.now.undivided, norms),
            told=found.traced,
            unseen=found.unseen | {stage for stage, flow in passed.items() if flow.untold},
            frozen=found.frozen,
            strange=bool(found.unmatched),
            renamed_by="names=",
        )

    def _stale(self) -> Iterator[StaleCall]:
        """The calls of watched stages that were given what an operation before had, and this one has nowhere."""
        earlier = [*enumerate(reversed(self.before), start=1)]
        for stage in self.now.found.stages if earlier else ():
            for number, call in enumerate(stage.part.calls or (), start=1):
                for given in (one for one in call.inputs if not _places(self.now, one)):
                    every = ((operation, _places(one, given)) for operation, one in earlier)
                    yield from (StaleCall(stage.index, number, k, places[0][1]) for k, places in every if places)

    @property
    def _pending(self) -> list[OperationRun]:
        """The operations before that added to the gradients that the next update uses."""
        since = takewhile(lambda one: one.found.name != "train", self.before)
        return [one for one in since if one.found.name == "accumulate"]

    @cached_property
    def _reference(self) -> Reference:
        """The reference that divides each loss before its backward."""
        found = self.now.found
        return self.now.run.reference(found.owner, found.copies, accumulation=self.now.accumulation)

    @cached_property
    def expected(self) -> Expected:
        """All, but for any update."""
        return self._whole(self._reference, self.now.undivided, lambda one: one.undivided, {})

    def _whole(
        self,
        reference: Reference,
        made: Sequence[Contribution],
        earlier: Callable[[OperationRun], Sequence[Contribution]],
        ran: Mapping[int, Sequence[int]],
    ) -> Expected:
        """What the microbatches ``made``, and those of ``earlier`` operations; where stages ran all, in that order."""
        stages = {stage for stage, _ in (*made[0].gradients, *self.now.found.copies)}

        def orders(count: int) -> Mapping[int, Sequence[int]]:
            every = range(count)
            return {stage: ran[stage] if sorted(ran.get(stage, ())) == [*every] else every for stage in stages}

        sums: Mapping[Site, Gradient] = {}
        for one in reversed(self._pending):
            parts = earlier(one)
            sums = reference.accumulate(parts, orders=orders(len(parts)), onto=sums, by=one.accumulation)
        return reference.before_update(self.now.run.batches, made, orders=orders(len(made)), onto=sums)

    @cached_property
    def update(self) -> Update:
        """The step as attribution sees it."""
        found, earlier, observed = self.now.found, self._pending, self.line.seen
        apart = [{s: name for s, name in copies.items() if s != NOWHERE} for copies in found.tied]
        return Update(
            observed.gradients(0),
            self._held,
            self._traced,
            tuple(self._traced_of(one, {}) for one in earlier),
            old=(earlier[-1].found if earlier else found).begun,
            tied=[copies for copies in apart if len(copies) > 1],
            placement=observed.schedule.placement,
            ranks=len(found.made) // found.replicas.count,
            replicas=found.replicas.count,
            computed_in=lambda: self.now.run.computed_in,
        )

    @cached_property
    def weights(self) -> Mapping[str, Tensor]:
        return {name: p.detach().cpu() for name, p in self.model.named_parameters(remove_duplicate=False)}

    @cached_property
    def beside(self) -> ModelBeside:
        """The reference that plays single microbatches."""
        batches, loss = self.now.run.batches, self.now.task.loss
        return ModelBeside(self._reference, self.model, batches, loss, lambda: self._traced, lacks=self._lacks)

    def with_weights(self, weights: Mapping[str, Tensor]) -> Given | None:
        """What the step gives with these weights in place of its own; None where that does not run."""
        model = copied(self.model)
        with torch.no_grad():
            for name, weight in weights.items():
                model.get_parameter(name).copy_(weight)
        reference = self.now.reference.of(model)
        try:
            made = [*reference.contributing(self.now.run.batches)]
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None
        whole = self._whole(reference, made, lambda one: one.made, self.line.seen.backwards(0))
        return Given(whole.losses, whole.loss, {name: one for (_, name), one in whole.gradients.items()})

    def _lacks(self, microbatch: int, seen: Sketch) -> bool:
        """Whether the reference computes no such tensor for a microbatch, and nothing that it was made of."""
        return self._computed[microbatch].lacks(seen)

    @cached_property
    def _computed(self) -> Sequence[Computed]:
        """What the reference computes for every microbatch."""
        model = copied(self.model)
        found = []
        for batch in self.now.run.batches:
            with Computed() as computed:
                batch.through(model)
            found.append(computed)
        return found

    @cached_property
    def _traced(self) -> Traced:
        """The reference, in the stages that were handed back."""
        return self._traced_of(self.now, {stage: passed.ends.values() for stage, passed in self.line.passed.items()})

    def _traced_of(self, one: OperationRun, ends: Mapping[int, Collection[str]]) -> Traced:
        """Operation ``one``, from the same weights, in the same stages."""
        losses = [made.loss for made in one.undivided]
        held, batches, loss = self._held.keys(), one.run.batches, one.task.loss
        return Traced(self.model, held=held, batches=batches, loss=loss, losses=losses, ends=ends)

    @cached_property
    def _held(self) -> Mapping[Site, Gradient]:
        gradients = self.expected.gradients
        return {site: gradients[site] for site in sorted(self.now.found.sites) if site[0] != NOWHERE}
