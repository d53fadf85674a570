"""What rounding alone does on this very run: the reference in other orders, and rounded otherwise."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from reference.data import Batch
from reference.step import Contribution, Expected, Gradient, Reference, Site, accumulate, in_double, one_place_off
from validation.judging.tolerance import (
    FP64,
    Floor,
    error,
    floor_of,
    precision_among,
    scalar_error,
    unmeasured,
)
from validation.judging.verdict import raised

Orders = Mapping[int, Sequence[int]]
Contributions = Sequence[tuple[Contribution, ...]]  # of each operation, by microbatch
Sums = dict[Site, Gradient]
Otherwise = Callable[[Reference, Expected, Sequence[Batch]], tuple[Contribution, ...]]


@dataclass(frozen=True)
class Pending:
    """One operation whose gradients the next update uses: what was expected, of which microbatches, in which order."""

    expected: Expected
    batches: Sequence[Batch]
    orders: Orders


@dataclass(frozen=True)
class _Elsewhere:
    """What each operation's microbatches give where numbers are rounded otherwise.

    Where fp64 tells nothing, ``apart`` are the contributions as they are, and ``nudged`` those with other weights.
    """

    apart: Contributions
    nudged: Contributions | None = None


class Floors:
    """The floors of one update, measured when first asked for; most runs are bitwise and never ask.

    ``pending`` are the operations whose gradients the update sums; the last is the update itself. ``obstacle`` says
    why fp64 told nothing, once that is known. Then only what other orders of addition explain may pass: that is less
    than would pass otherwise.
    """

    def __init__(self, reference: Reference, pending: Sequence[Pending]) -> None:
        self._reference = reference
        self._pending = tuple(pending)
        self._last = pending[-1].expected
        self._precision = precision_among(reference.model.parameters())
        # Nothing is wider than fp64; there it is the weights that are rounded once more (as TTrace does with inputs).
        self._otherwise = one_place_off if self._precision is FP64 else in_double
        self.obstacle = ""

    @cached_property
    def _elsewhere(self) -> _Elsewhere:
        found, why = self._computed(self._otherwise)
        if found is not None:
            return _Elsewhere(found)
        self.obstacle = f"rounding was not measured against fp64: there the reference {why}"
        nudged = None if self._otherwise is one_place_off else self._computed(one_place_off)[0]
        return _Elsewhere([one.expected.contributions for one in self._pending], nudged)

    def _computed(self, otherwise: Otherwise) -> tuple[Contributions | None, str]:
        """All contributions computed ``otherwise``, or None and why they tell nothing: it is the user's code."""
        try:
            found = [otherwise(self._reference, one.expected, one.batches) for one in self._pending]
        except Exception as error:
            return None, f"raised {raised(error)}"
        own = [one.expected.contributions for one in self._pending]
        # A model that draws otherwise in another precision, as dropout does, says nothing about rounding there.
        alike = all(
            scalar_error(one.loss, other.loss) <= self._precision.most
            for pair in zip(own, found, strict=True)
            for one, other in zip(*pair, strict=True)
        )
        return (found, "") if alike else (None, "gives other losses")

    @cached_property
    def _reversed_total(self) -> Sums:
        sums: Sums = {}
        for one in reversed(self._pending):
            orders = {stage: tuple(reversed(order)) for stage, order in one.orders.items()}
            sums = accumulate(one.expected.contributions, orders=orders, onto=sums)
        return self._reference.total(sums)

    @cached_property
    def _apart_total(self) -> Sums:
        return self._total(self._elsewhere.apart)

    @cached_property
    def _nudged_total(self) -> Sums:
        return {} if self._elsewhere.nudged is None else self._total(self._elsewhere.nudged)

    def _total(self, made: Contributions) -> Sums:
        sums: Sums = {}
        for one, contributions in zip(self._pending, made, strict=True):
            sums = accumulate(contributions, orders=one.orders, onto=sums)
        return self._reference.total(sums)

    def gradient(self, site: Site) -> Floor:
        """The floor of one site's gradient."""
        expected, other, apart = self._last.gradients[site], self._reversed_total[site], self._apart_total[site]
        if expected is None or other is None or apart is None:
            return Floor(0.0, 0.0, 0.0, self._precision)
        late, nudged, home = self._reference.late, self._nudged_total.get(site), self._reference.home(site)
        parts = [one.gradients[home] for pending in self._pending for one in pending.expected.contributions]
        shares = [None if part is None else part.cpu() / late for part in parts]
        floor = floor_of(expected.cpu(), [other.cpu()], apart.cpu(), shares)
        return floor if nudged is None else replace(floor, nudged=error(expected.cpu(), nudged.cpu()))

    def loss(self, microbatch: int) -> Floor:
        """The floor of one microbatch's loss."""
        made, own = self._elsewhere, self._last.losses[microbatch]
        nudged = 0.0 if made.nudged is None else scalar_error(own, made.nudged[-1][microbatch].loss)
        if self.obstacle:
            return unmeasured(self._precision, nudged=nudged)
        return Floor(0.0, scalar_error(own, made.apart[-1][microbatch].loss), 0.0, self._precision)

    def norm(self) -> Floor:
        """The floor of the gradient norm."""
        norm = self._last.norm or 0.0
        totals = (self._reversed_total, self._apart_total, self._nudged_total or self._apart_total)
        permutation, rounding, nudged = (scalar_error(self._reference.norm(total), norm) for total in totals)
        if self.obstacle:
            return unmeasured(self._precision, permutation=permutation, nudged=nudged)
        return Floor(permutation, rounding, 0.0, self._precision)

    def worst(self) -> float:
        """The largest floor over all gradients."""
        return max((self.gradient(site).largest for site in self._last.gradients), default=0.0)
