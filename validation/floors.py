"""What rounding alone does on this very run: the reference in other orders, and in fp64."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from reference.data import Batch
from reference.step import Contribution, Expected, Reference, Site, accumulate, in_double
from validation.tolerance import UNIT, Floor, floor_of, scalar_error

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

    @cached_property
    def _double(self) -> list[tuple[Contribution, ...]]:
        return [in_double(self._reference, one.expected, one.batches) for one in self._pending]

    @cached_property
    def _reversed_total(self) -> dict[Site, Tensor | None]:
        sums: dict[Site, Tensor | None] = {}
        for one in reversed(self._pending):
            orders = {stage: tuple(reversed(order)) for stage, order in one.orders.items()}
            sums = accumulate(one.expected.contributions, orders=orders, onto=sums)
        return self._reference.total(sums)

    @cached_property
    def _double_total(self) -> dict[Site, Tensor | None]:
        sums: dict[Site, Tensor | None] = {}
        for one, double in zip(self._pending, self._double, strict=True):
            sums = accumulate(double, orders=one.orders, onto=sums)
        return self._reference.total(sums)

    def gradient(self, site: Site) -> Floor:
        """The floor of one site's gradient."""
        expected, other, double = self._last.gradients[site], self._reversed_total[site], self._double_total[site]
        if expected is None or other is None or double is None:
            return Floor(0.0, 0.0, 0.0)
        late = self._reference.late
        parts = [one.gradients[site] for pending in self._pending for one in pending.expected.contributions]
        shares = [None if part is None else part.cpu() / late for part in parts]
        return floor_of(expected.cpu(), [other.cpu()], double.cpu(), shares)

    def loss(self, microbatch: int) -> Floor:
        """The floor of one microbatch's loss."""
        wide = self._double[-1][microbatch].loss
        return Floor(0.0, scalar_error(self._last.losses[microbatch], wide), 0.0)

    def norm(self) -> Floor:
        """The floor of the gradient norm."""
        norm = self._last.norm or 0.0
        others = (self._reference.norm(total) for total in (self._reversed_total, self._double_total))
        permutation, double = (scalar_error(other, norm) for other in others)
        return Floor(permutation, double, 0.0)

    def parameter(self, site: Site) -> Floor:
        """The floor of one site's update: its gradient's, or the rounding of the parameter itself if that is more."""
        gradient = self.gradient(site)
        before, after = self._last.before[site[1]].double(), self._last.parameters[site].double()
        step = (after - before).abs().amax().item()
        rounding = UNIT * before.abs().amax().item() / step if step else 0.0
        return Floor(gradient.permutation, max(gradient.double, rounding), gradient.fault)

    def worst(self) -> float:
        """The largest floor over all gradients."""
        return max((self.gradient(site).largest for site in self._last.gradients), default=0.0)
