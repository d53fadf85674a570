"""What rounding alone does on this very run: the reference in other orders, and rounded otherwise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from reference.data import Batch
from reference.step import Contribution, Expected, Reference, Site, accumulate, in_double
from validation.judging.tolerance import Floor, floor_of, precision_of, scalar_error

Orders = Mapping[int, Sequence[int]]


@dataclass(frozen=True)
class Pending:
    """One operation whose gradients the next update uses: what was expected, of which microbatches, in which order."""

    expected: Expected
    batches: Sequence[Batch]
    orders: Orders


class Floors:
    """The floors of one update, measured when first asked for; most runs are bitwise and never ask.

    ``pending`` are the operations whose gradients the update sums; the last is the update itself.
    """

    def __init__(self, reference: Reference, pending: Sequence[Pending]) -> None:
        self._reference = reference
        self._pending = tuple(pending)
        self._last = pending[-1].expected
        dtype = next(reference.model.parameters()).dtype
        self._precision = precision_of(dtype)
        # Nothing is wider than fp64; there it is the weights that are rounded once more (as TTrace does with inputs).
        self._nudge = 2 * self._precision.unit if dtype is torch.float64 else 0.0

    @cached_property
    def _apart(self) -> list[tuple[Contribution, ...]]:
        found = [in_double(self._reference, one.expected, one.batches, nudge=self._nudge) for one in self._pending]
        own = [one.expected.contributions for one in self._pending]
        # A model that draws otherwise in another precision, as dropout does, says nothing about rounding there.
        alike = all(
            scalar_error(one.loss, other.loss) <= self._precision.most
            for pair in zip(own, found, strict=True)
            for one, other in zip(*pair, strict=True)
        )
        return found if alike else own

    @cached_property
    def _reversed_total(self) -> dict[Site, Tensor | None]:
        sums: dict[Site, Tensor | None] = {}
        for one in reversed(self._pending):
            orders = {stage: tuple(reversed(order)) for stage, order in one.orders.items()}
            sums = accumulate(one.expected.contributions, orders=orders, onto=sums)
        return self._reference.total(sums)

    @cached_property
    def _apart_total(self) -> dict[Site, Tensor | None]:
        sums: dict[Site, Tensor | None] = {}
        for one, apart in zip(self._pending, self._apart, strict=True):
            sums = accumulate(apart, orders=one.orders, onto=sums)
        return self._reference.total(sums)

    def gradient(self, site: Site) -> Floor:
        """The floor of one site's gradient."""
        expected, other, apart = self._last.gradients[site], self._reversed_total[site], self._apart_total[site]
        if expected is None or other is None or apart is None:
            return Floor(0.0, 0.0, 0.0, self._precision)
        late = self._reference.late
        home = self._reference.home(site)
        parts = [one.gradients[home] for pending in self._pending for one in pending.expected.contributions]
        shares = [None if part is None else part.cpu() / late for part in parts]
        return floor_of(expected.cpu(), [other.cpu()], apart.cpu(), shares)

    def loss(self, microbatch: int) -> Floor:
        """The floor of one microbatch's loss."""
        apart = self._apart[-1][microbatch].loss
        return Floor(0.0, scalar_error(self._last.losses[microbatch], apart), 0.0, self._precision)

    def norm(self) -> Floor:
        """The floor of the gradient norm."""
        norm = self._last.norm or 0.0
        others = (self._reference.norm(total) for total in (self._reversed_total, self._apart_total))
        permutation, rounding = (scalar_error(other, norm) for other in others)
        return Floor(permutation, rounding, 0.0, self._precision)

    def worst(self) -> float:
        """The largest floor over all gradients."""
        return max((self.gradient(site).largest for site in self._last.gradients), default=0.0)
