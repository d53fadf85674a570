"""An operation whose gradients an update uses."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeproof.reference.data import Batch
from pipeproof.reference.step import Expected, Reference

Orders = Mapping[int, Sequence[int]]


@dataclass(frozen=True)
class Pending:
    """One operation whose gradients the next update uses: what was expected, of which microbatches, in which order.

    ``reference``: its own, where operations divide losses by other numbers; None: that of all of them.
    """

    expected: Expected
    batches: Sequence[Batch]
    orders: Orders
    reference: Reference | None = None
