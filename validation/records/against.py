"""A comparison with what a record says of an operation: its laws, and what rounding may do there."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from validation.judging.comparison import Comparison
from validation.judging.ledger import Ledger
from validation.judging.tolerance import (
    Floor,
    Precision,
    precision_among,
    precision_of,
)
from validation.records.record import RecordedOperation

LAWS = (
    "parameters-once",  # every parameter of the one is in exactly one place of the other
    "loss",  # each microbatch's, and the whole operation's
    "none-ness",  # a gradient is None exactly where the other is
    "gradient",  # every parameter's
    "grad-norm",  # over logical parameters
    "updated-parameters",  # after clip and optimizer step
    "buffers",  # what forwards leave behind, such as running statistics
)
_LOST = 1 / 64  # of an update: as much as a fault changes, where nobody measured the smallest


def against(expected: RecordedOperation, ledger: Ledger, *, number: int = 0) -> Comparison:
    """A comparison with ``expected``, the operation ``number`` of a record."""
    return Comparison(expected, Recorded(expected), ledger, number=number)


@dataclass(frozen=True)
class Recorded:
    """What rounding may do to an operation, as recorded.

    Where nobody measured it, little is rounding, much is wrong, and what is between is unknown.
    """

    expected: RecordedOperation

    @cached_property
    def precision(self) -> Precision:
        """How the operation's numbers are rounded."""
        floors, one = self.expected.floors, self.expected
        if floors is not None:
            return floors.norm.precision
        found = (source[name] for source in (one.gradients, one.before) for name in source)
        return precision_among(tensor for tensor in found if tensor is not None)

    def loss(self, microbatch: int) -> Floor:
        """Of a microbatch's loss."""
        floors = self.expected.floors
        return self.total() if floors is None else floors.losses[microbatch]

    def total(self) -> Floor:
        """Of the whole operation's loss, which nobody measures."""
        return Floor(0.0, 0.0, 4 * self.precision.most, self.precision)

    def norm(self) -> Floor:
        """Of the gradient norm."""
        return self.total() if self.expected.floors is None else self.expected.floors.norm

    def gradient(self, name: str) -> Floor:
        """Of a gradient."""
        if self.expected.floors is not None:
            return self.expected.floors.gradients[name]
        gradient = self.expected.gradients.get(name)
        precision = self.precision if gradient is None else precision_of(gradient.dtype)
        return Floor(0.0, 0.0, 4 * precision.most, precision)

    def update(self, name: str) -> Floor:
        """Of a parameter's movement."""
        floor = self.gradient(name)
        return replace(floor, fault=2 * _LOST) if self.expected.floors is None else floor


def upstream(names: Iterable[str], stages: dict[str, int]) -> list[str]:
    """From the last stage to the first; from the last of the model's parameters, where stages are not known.

    As gradients flow: the first to differ is nearest to the fault.
    """
    return sorted([*names][::-1], key=lambda name: -stages.get(name, 0))
