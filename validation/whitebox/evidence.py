"""Evidence about a custom step: ranks' results beside the reference."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile

import torch
from torch import Tensor, nn

from pipeproof.core.execution import flow
from pipeproof.core.ledger import NOWHERE
from pipeproof.core.old_weights import Given, StaleCall, hold_to_old_weights
from pipeproof.core.verdict import Verdict
from pipeproof.explain.atoms import Update
from pipeproof.explain.evidence import Evidence, Line
from pipeproof.explain.explain import explain_safely, explain_verdict
from pipeproof.explain.members import Members
from pipeproof.explain.played import ModelBeside
from pipeproof.reference.copied import deep_copy
from pipeproof.reference.step import Contribution, Expected, Gradient, Reference, Site
from pipeproof.reference.traced import Traced
from pipeproof.whitebox.operation_run import OperationRun
from pipeproof.whitebox.tensor_index import Computed

_BY_DESIGN = ("zero", "missing", "shape")  # one rank may serve all in its line with the loss, or hand on a part


def explain(verdict: Verdict, now: OperationRun, model: nn.Module, before: Sequence[OperationRun]) -> Verdict:
    """Add causes to ``verdict``, from the first operation with a mismatch.

    model: a second reference with its starting weights. before: earlier operations, latest first.
    """
    known = now.passages(undivided=True)
    if now.run.crash is not None:
        return verdict.drop_cause(now.run.crash)
    observed = now.found.observe(known)
    lines = [Line(observed.along(number), flows) for number, flows in enumerate(known)]

    def first_wrong(line: Line) -> tuple[float, ...]:
        """Return the first wrong tensor's position in the flow. On later lines, some deviations may be deliberate."""
        wrong = [one for one in line.observed.crossings(0) if not one.same]
        if line is not lines[0]:
            meant = (one.really is None or one.really.kind in _BY_DESIGN for one in wrong)
            wrong = [one for one, by_design in zip(wrong, meant, strict=True) if one.judged or not by_design]
        return min((flow(one, line.observed.schedule.n_stages) for one in wrong), default=(float("inf"),))

    along = sorted(lines, key=first_wrong)
    evidence = _RightStep(now, model, tuple(before), along[0]).evidence(verdict, along[1:])
    verdict = hold_to_old_weights(verdict, lambda: evidence.old_weights)
    evidence = replace(evidence, verdict=verdict)
    return explain_safely(verdict, lambda: explain_verdict(evidence))


@dataclass(frozen=True)
class _RightStep:
    """The right results for operation ``now``, from ``model`` with its starting weights.

    before: earlier operations, latest first. line: the ranks' actions.
    """

    now: OperationRun
    model: nn.Module
    before: tuple[OperationRun, ...]
    line: Line

    def evidence(self, verdict: Verdict, others: Sequence[Line]) -> Evidence:
        """Collect all evidence; ``others``: further lines."""
        found, observed, passed = self.now.found, self.line.observed, self.line.passed
        norms = [row[0].norm for row in observed.ranks]
        return Evidence(
            verdict,
            observed.schedule.placement,
            len(self.now.run.batches),
            len(found.made),
            operation=found.name,
            gradients=observed.gradients(0),
            norms=norms,
            right=self,
            beside=self.beside,
            run=observed,
            passed=passed,
            others=tuple(others),
            stale=tuple(self._stale()),
            earlier_weights=[one.run.weights for one in self.before],
            with_weights=self.with_weights,
            clipped_to=found.max_norm,
            scale=found.loss_scale,
            members=Members(found.stages, found.replicas, lambda: self.now.undivided, norms),
            traced=found.traced,
            unseen=found.unseen | {stage for stage, flow in passed.items() if flow.untold},
            frozen=found.frozen,
            strange=bool(found.unmatched),
            renamed_by="names=",
        )

    def _stale(self) -> Iterator[StaleCall]:
        """Yield calls whose inputs occur in an earlier operation, and nowhere in this one."""
        earlier, now = [one.run.places for one in reversed(self.before)], self.now.run.places
        for stage in self.now.found.stages if earlier else ():
            for number, call in enumerate(stage.part.calls or (), start=1):
                for given in (one for one in call.inputs if now is None or not now[0].holding(one)):
                    every = (() if places is None else places[0].holding(given) for places in earlier)
                    yield from (StaleCall(stage.index, number, k, at[0][1]) for k, at in enumerate(every, 1) if at)

    @property
    def _pending(self) -> list[OperationRun]:
        """Earlier operations whose gradients the next update also uses."""
        since = takewhile(lambda one: one.found.name != "train", self.before)
        return [one for one in since if one.found.name == "accumulate"]

    @cached_property
    def _reference(self) -> Reference:
        """A reference that divides each loss before its backward."""
        found = self.now.found
        return self.now.run.reference(found.owner, found.copies, accumulation=self.now.accumulation)

    @cached_property
    def expected(self) -> Expected:
        """Expected results, without updates."""
        return self._whole(self._reference, self.now.undivided, lambda one: one.undivided, {})

    def _whole(
        self,
        reference: Reference,
        made: Sequence[Contribution],
        earlier: Callable[[OperationRun], Sequence[Contribution]],
        ran: Mapping[int, Sequence[int]],
    ) -> Expected:
        """Combine ``made`` with ``earlier`` operations' contributions, in execution order for complete stages."""
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
        """The step as input for attribution."""
        found, earlier, observed = self.now.found, self._pending, self.line.observed
        apart = [{s: name for s, name in copies.items() if s != NOWHERE} for copies in found.tied]
        return Update(
            observed.gradients(0),
            self._held,
            self._traced,
            tuple(self._trace(one, {}) for one in earlier),
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
        """A reference that replays single microbatches."""
        return ModelBeside(
            self._reference,
            self.model,
            self.now.run.batches,
            self.now.task.loss,
            lambda: self._traced,
            lacks=lambda m, observed: self._computed[m].lacks(observed),
        )

    def with_weights(self, weights: Mapping[str, Tensor]) -> Given | None:
        """Run the reference with other weights. None after an error."""
        model = deep_copy(self.model)
        with torch.no_grad():
            for name, weight in weights.items():
                model.get_parameter(name).copy_(weight)
        reference = self.now.reference.of(model)
        try:
            made = [*reference.contributing(self.now.run.batches)]
        except (RuntimeError, TypeError, ValueError, IndexError):
            return None
        whole = self._whole(reference, made, lambda one: one.made, self.line.observed.backwards(0))
        return Given(whole.losses, whole.loss, {name: one for (_, name), one in whole.gradients.items()})

    @cached_property
    def _computed(self) -> Sequence[Computed]:
        """Reference computations by microbatch."""
        model = deep_copy(self.model)
        found = []
        for batch in self.now.run.batches:
            with Computed() as computed:
                batch.through(model)
            found.append(computed)
        return found

    @cached_property
    def _traced(self) -> Traced:
        """The reference, traced in the returned stages."""
        return self._trace(self.now, {stage: passed.ends.values() for stage, passed in self.line.passed.items()})

    def _trace(self, one: OperationRun, ends: Mapping[int, Collection[str]]) -> Traced:
        """Trace an operation from the same weights, in the same stages."""
        losses = [made.loss for made in one.undivided]
        held, batches, loss = self._held.keys(), one.run.batches, one.task.loss
        return Traced(self.model, held=held, batches=batches, loss=loss, losses=losses, ends=ends)

    @cached_property
    def _held(self) -> Mapping[Site, Gradient]:
        gradients = self.expected.gradients
        return {site: gradients[site] for site in sorted(self.now.found.sites) if site[0] != NOWHERE}
