"""What must hold of a step that is not ours, and its right answers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from pipeproof.foreign.assemble import Assembled
from pipeproof.foreign.reference_run import ReferenceRun, SecondModel
from pipeproof.foreign.task import Task
from pipeproof.foreign.unseen import missed, skipped, unreported
from pipeproof.judging.oracle import Answer, Floors, Orders, Pending, Requirements, precision_of_reference
from pipeproof.judging.tolerance import Precision
from pipeproof.observers.observed import Observed
from pipeproof.reference.data import Batch
from pipeproof.reference.step import Contribution, Reference

LAWS = (
    "parameters-once",  # every parameter of the reference is held once, and nothing else is
    "initial-weights",  # those that the step started from
    "microbatches",  # every watched stage ran forward and backward once for each microbatch
    "boundaries",  # what passed the boundaries of watched stages
    "loss",  # each microbatch's, or the whole step's, on every rank that reports it
    "presence",  # a gradient is None exactly where the reference's is
    "gradient",  # every parameter's
    "shards",  # those of a parameter make up the whole
    "replicas",  # every replica holds every stage, and has the same gradients
    "tied-copies",  # gradients of all copies are equal
    "grad-norm",  # on every rank that reports it
    "updated-parameters",  # what the optimizer made of them, where there is one
)


@dataclass(frozen=True)
class StepOracle:
    """Knows what every microbatch gives, and adds it up in the order that it is asked for."""

    task: Task
    reference: Reference
    batches: Sequence[Batch]
    made: Sequence[Contribution]
    max_norm: float | None = None  # what gradients are clipped to before the update

    @property
    def precision(self) -> Precision:
        """That of the reference's parameters."""
        return precision_of_reference(self.reference)

    def answer(self, number: int, orders: Orders) -> Answer:
        """The one operation there is."""
        assert number == 0, "a foreign step is one operation"
        expected = self.reference.before_update(self.batches, self.made, orders=orders)
        updated = partial(self.task.updated, self.reference, max_norm=self.max_norm)
        expected = replace(expected, parameters=updated(expected.gradients))
        pending = (Pending(expected, self.batches, orders),)
        return Answer(expected, Floors(self.reference, pending, updated=updated), math.inf)


def required_of(
    title: str,
    task: Task,
    found: Assembled,
    second: SecondModel,
    *,
    run: ReferenceRun,
    reference: Reference,
    observed: Observed,
) -> Requirements:
    """What must hold of what is ``observed``, by the ``reference`` that ``run`` made."""
    made = run.made(found.owner)
    of_weights = replace(task, optimizer=None) if found.unlike else task
    return Requirements(
        title,
        LAWS if task.optimizer is not None else LAWS[:-1],
        ("train",),
        len(made),
        found.due,
        StepOracle(of_weights, reference, run.batches, made, found.max_norm),
        found.tied,
        skipped=dict(skipped(found, observed)),
        missed=dict(missed(found, observed)),
        remarks=found.remarks | unreported(observed),
        unmatched=found.unmatched,
        unseen=found.unseen,
        uncalled=found.uncalled,
        frozen=found.frozen,
        traced=found.traced,
        every_rank=False,
        by_numbers=True,
        mode_matters=lambda: second.mode_matters([one.loss for one in made], run.batches),
    )
