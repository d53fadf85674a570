"""The right answers for a step that is not ours."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from pipeproof.foreign.reference_run import Task
from pipeproof.judging.oracle import Answer, Floors, Orders, Pending, precision_of_reference
from pipeproof.judging.tolerance import Precision
from pipeproof.reference.data import Batch
from pipeproof.reference.step import Contribution, Reference


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
