"""Measure rounding floors for each output of a step, on the actual run."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from statistics import median

import torch
from torch import Tensor

from pipeproof.core.limits import BY_NAME, DRAWS, FP32, FP64, HARDLY, Precision, coarsest, precision_among, precision_of
from pipeproof.core.makeup import compare_shares
from pipeproof.core.nudged import Nudged, Sums
from pipeproof.core.observe.elements import is_rounded
from pipeproof.core.tolerance import Floor, default_floor, error, floor_of, in_both, rounding_of, scalar_error
from pipeproof.core.updates import Pending, Updates, gradients_off
from pipeproof.core.verdict import describe_error
from pipeproof.reference.accumulation import PLAIN, Accumulation
from pipeproof.reference.data import Batch
from pipeproof.reference.otherwise import Made, in_double, make_from, one_place_off
from pipeproof.reference.step import Contribution, Expected, Gradient, Reference, Site

Contributions = Sequence[tuple[Contribution, ...]]  # of each operation, by microbatch
Otherwise = Callable[[Reference, Expected, Sequence[Batch]], tuple[Contribution, ...]]


class Floors:
    """Floors for one update, measured on first use; most runs are bitwise and skip it.

    pending: operations whose gradients the update sums; the update comes last. obstacle: why fp64 failed to measure
    rounding, if it did; then only reordered additions may pass, a stricter rule. updated: maps gradients to parameters;
    without it an update's floor equals its gradient's.
    """

    def __init__(
        self,
        reference: Reference,
        pending: Sequence[Pending],
        *,
        updated: Updates | None = None,
    ) -> None:
        self._reference = reference
        self._updated = updated
        self._pending = tuple(pending)
        self._last = pending[-1].expected
        self._precision = precision_among(reference.model.parameters())
        # fp64 has no wider type, so its weights move by one rounding instead (as TTrace does with inputs).
        self._otherwise = one_place_off if self._precision is FP64 else in_double
        self.obstacle = ""
        self._computed_in: Precision | None = None  # rounding in nudged numbers, if coarser
        self._wide: dict[torch.dtype, Sums] = {}

    @cached_property
    def _apart(self) -> Contributions:
        """Return microbatch contributions under other rounding, or the original ones if measurement fails.

        If the reference computes in a type narrower than its weights, gradients must agree to that type's rounding:
        models that draw other random numbers in fp64 do not.
        """
        narrow = self._narrowest
        found, why = self._compute(self._otherwise, most=narrow.most)
        if found is not None and narrow.unit > self._precision.unit:
            pairs = zip(self._last.contributions, found[-1], strict=True)
            gaps = [error(one, two) for own, other in pairs for one, two in in_both(own.gradients, other.gradients)]
            if not gaps or median(gaps) > narrow.most:
                found, why = None, "gives other gradients"
        if found is None:
            self.obstacle = f"rounding was not measured against fp64: there the reference {why}"
        return found or [one.expected.contributions for one in self._pending]

    @cached_property
    def _nudged(self) -> Contributions | None:
        """Return contributions with weights one rounding off, in the narrowest type if fp64 failed."""
        if self._otherwise is one_place_off:
            return None
        narrow, tells = self._narrowest, bool(self._apart) and not self.obstacle
        if not tells and narrow.unit > self._precision.unit:
            found, _ = self._compute(partial(one_place_off, unit=narrow.unit), most=narrow.most)
            if found is not None:
                self._computed_in = narrow
                return found
        return self._compute(one_place_off, most=math.inf if tells else self._precision.most)[0]

    @cached_property
    def _coarse(self) -> tuple[Precision, float]:
        """Return the computing precision, and the median gradient error: single values may be small by chance.

        It is coarser than the weights', as under autocast, if fp64 shows it. Little may be computed in the narrow type,
        so its minimum allowance passes only if measured.
        """
        own, narrow = self._precision, self._narrowest
        if self._otherwise is one_place_off or narrow.unit <= own.unit or not self._apart or self.obstacle:
            return own, 0.0
        found = [error(one, apart) for one, apart in in_both(self._last.gradients, self._apart_total)]
        usual = median([size for size in found if size < math.inf] or [0.0])
        coarse = own.factor * usual > own.most
        return (replace(narrow, least=own.most, most=narrow.least), usual) if coarse else (own, 0.0)

    def _coarsely(self, floor: Floor, usual: float = 0.0) -> Floor:
        """Widen ``floor`` to the computing precision, and to what is ``usual``."""
        return floor if floor.noise else replace(floor, rounding=max(floor.rounding, usual, self._coarse[1]))

    @cached_property
    def _narrowest(self) -> Precision:
        """Return the narrowest precision in use."""
        products = (BY_NAME[one] for one in self.products.values())
        return coarsest([self._precision, *map(precision_of, self._made.types), *products])

    @property
    def products(self) -> Mapping[str, str]:
        """Return the rounding type for fp32 products, by sort."""
        return self._made.products

    @cached_property
    def _made(self) -> Made:
        try:
            return make_from(self._reference, self._last, self._pending[-1].batches)
        except Exception:  # user code may fail on a second run
            return Made()

    @cached_property
    def moved(self) -> Nudged | None:
        """Measure movement under weights one rounding off. None without a narrow computing type."""
        if (narrow := self._narrowest).unit <= FP32.unit:
            return None
        off, ways = partial(one_place_off, unit=2 * narrow.unit), product(range(DRAWS), (1, -1))
        made = (self._compute(partial(off, draw=draw, way=way), most=math.inf)[0] for draw, way in ways)
        totals = ((self._total(one), [m.loss for m in one[-1]]) for one in made if one is not None)
        expected, norm, least = self._last, self._reference.norm, self._precision.least
        updated = self._updated if expected.parameters else None  # without any, they follow from the same gradients
        return Nudged.measure(expected, totals, unit=narrow.unit, least=least, norm=norm, updated=updated)

    def _excuse(self, gap: float) -> float:
        """Convert a gap to nudged numbers into a floor for our own factor."""
        own, narrow = self._precision, self._computed_in
        return gap if narrow is None else max(narrow.factor * gap, narrow.least) / own.factor

    def _compute(self, otherwise: Otherwise, *, most: float) -> tuple[Contributions | None, str]:
        """Compute all contributions ``otherwise``; on failure return None and the reason.

        most: allowed loss error; infinite if losses agree up to rounding by construction.
        """
        try:
            found = [otherwise(one.reference or self._reference, one.expected, one.batches) for one in self._pending]
        except Exception as error:
            return None, f"raised {describe_error(error)}"
        own = [one.expected.contributions for one in self._pending]
        nothing = HARDLY * max(abs(one.loss) for some in own for one in some)
        # A model that draws other random numbers in another precision, as dropout does, reveals nothing about rounding.
        alike = most == math.inf or all(
            scalar_error(one.loss, other.loss) <= most or abs(other.loss) <= nothing
            for pair in zip(own, found, strict=True)
            for one, other in zip(*pair, strict=True)
        )
        return (found, "") if alike else (None, "gives other losses")

    @cached_property
    def _reversed_total(self) -> Sums:
        return self._total([one.expected.contributions for one in self._pending], step=-1)

    @cached_property
    def _apart_total(self) -> Sums:
        # Keep the gradients' own types: no further rounding may enter the measurement.
        return self._total(self._apart, by=PLAIN)

    @cached_property
    def _nudged_total(self) -> Sums:
        return {} if self._nudged is None else self._total(self._nudged)

    def _total(self, made: Contributions, *, by: Accumulation | None = None, step: int = 1) -> Sums:
        """Add up contributions in each stage's order, or backwards by ``step`` -1."""
        sums: Sums = {}
        for one, contributions in [*zip(self._pending, made, strict=True)][::step]:
            own = one.reference or self._reference
            orders = {stage: order[::step] for stage, order in one.orders.items()}
            how = by and replace(by, shares=own.recipe.accumulation.shares)
            sums = own.accumulate(contributions, orders=orders, onto=sums, by=how)
        return self._reference.total(sums)

    def gradient(self, site: Site) -> Floor:
        """Return the floor for one site's gradient."""
        expected, other, apart = self._last.gradients[site], self._reversed_total[site], self._apart_total[site]
        if expected is None or other is None or apart is None:
            return Floor(0.0, 0.0, 0.0, self._precision)
        parts, coarse = self._parts(site), self._coarse[0]
        floor = floor_of(expected, [other], apart, parts, again=lambda: self._nudged_total.get(site), computed=coarse)
        if self.obstacle and (nudged := self._nudged_total.get(site)) is not None:
            floor = replace(floor, nudged=self._excuse(error(expected, nudged)))
        return self._coarsely(floor)

    def gradient_by_microbatch(self, site: Site) -> Floor:
        """Return the gradient floor, with a per-microbatch test if rounding reaches half a contribution."""
        floor, expected = self.gradient(site), self._last.gradients[site]
        if expected is None or not floor.blind or self.obstacle:
            return floor
        others = [one for total in (self._reversed_total, self._apart_total) if (one := total[site]) is not None]
        return replace(floor, alike=compare_shares(expected, others, self._parts(site), factor=self._precision.factor))

    def _parts(self, site: Site) -> list[Gradient]:
        """Return microbatch contributions from each stage with a copy."""
        late, homes = self._reference.late, self._reference.homes(site)
        contributions = [one for pending in self._pending for one in pending.expected.contributions]
        parts = [one.gradients[home] for one in contributions for home in homes]
        return [None if part is None else part / late for part in parts]

    def update(self, site: Site, *, pushed: bool = False) -> Floor:
        """Return the floor for an optimizer update under the exact gradient.

        pushed: under gradients with rounding-level errors, too. Whatever the optimizer makes from gradients within
        their limits proves no fault, however far it goes.
        """
        floor = replace(self.gradient(site), sums=None)  # an update has no more digits than its parameter
        if self._updated is None or floor.noise or site not in self._expected:
            return floor
        expected, before = self._expected[site], self._last.before[site[1]]

        def far(parameters: Mapping[Site, Tensor]) -> float:
            return error(parameters[site], expected, base=before, rounded=True) / floor.precision.factor

        nudged = max(map(far, self._off)) if pushed else 0.0
        return replace(floor, rounding=max(floor.rounding, far(self._settled)), nudged=max(floor.nudged, nudged))

    @cached_property
    def _off(self) -> Sequence[Mapping[Site, Tensor]]:
        """Return parameters updated with gradients pushed to their floors' limits."""
        assert self._updated is not None, "asked for only where there is an optimizer"
        expected = self._last.gradients
        floors = {site: self.gradient(site) for site in expected}
        made = gradients_off(expected, floors, there=self._apart_total)
        return [self._updated(one, norm=self._last.norm) for one in made]

    @cached_property
    def _settled(self) -> Mapping[Site, Tensor]:
        """Return parameters updated with settings one fp32 rounding off.

        Fused kernels keep settings in fp32: 1 - beta² then has few digits.
        """
        assert self._updated is not None, "asked for only where there is an optimizer"
        return self._updated(self._last.gradients, norm=self._last.norm, off=FP32.unit)

    @cached_property
    def _expected(self) -> Mapping[Site, Tensor]:
        if self._last.parameters or self._updated is None:
            return self._last.parameters
        return self._updated(self._last.gradients, norm=self._last.norm)

    def sum_in(self, dtype: torch.dtype, site: Site) -> Tensor | None:
        """Return one site's gradient, summed in ``dtype``."""
        if dtype not in self._wide:
            by = replace(self._reference.recipe.accumulation, dtype=dtype)
            self._wide[dtype] = self._total([one.expected.contributions for one in self._pending], by=by)
        return self._wide[dtype][site]

    def loss(self, microbatch: int) -> Floor:
        """Return the floor for one microbatch's loss."""
        floor = self._of_tensor(microbatch, lambda one: torch.tensor(one.loss, dtype=torch.float64))
        return self._coarsely(floor, self._usual)

    @cached_property
    def _usual(self) -> float:
        """Return the median loss error under rounding: single losses may be lucky."""
        pairs = zip(self._last.losses, self._apart[-1], strict=True)
        return median(scalar_error(own, apart.loss) for own, apart in pairs)

    def output(self, microbatch: int, name: str) -> Floor:
        """Return the floor for a microbatch's named output."""
        return self._of_tensor(microbatch, lambda one: one.outputs[name])

    def scores(self, microbatch: int, router: str, number: int) -> Floor:
        """Return the floor for a router's scores in its choice ``number``, without excluded choices."""

        def score(one: Contribution) -> Tensor:
            scores = one.choices[router][number].scores_TE
            return scores.masked_fill(~scores.isfinite(), 0.0)

        return self._of_tensor(microbatch, score)

    def _of_tensor(self, microbatch: int, tensor: Callable[[Contribution], Tensor]) -> Floor:
        """Return the floor for a microbatch tensor.

        A coarser computing type makes it equally coarse, whatever type stores it.
        """
        own, apart = tensor(self._last.contributions[microbatch]), tensor(self._apart[-1][microbatch])
        if not is_rounded(own.dtype):
            return Floor(0.0, 0.0, 0.0, self._precision)
        precision = coarsest([precision_of(own.dtype), self._coarse[0]])

        def again() -> Tensor | None:
            return None if self._nudged is None else tensor(self._nudged[-1][microbatch])

        if not self.obstacle:
            return rounding_of(own, apart, again=again, precision=precision)
        other = again()
        return default_floor(precision, nudged=0.0 if other is None else self._excuse(error(own, other)))

    def total(self) -> Floor:
        """Return the floor for the step's total: unmeasured, except for losses from rounding alone."""
        sizes = [self.loss(microbatch).size for microbatch in range(len(self._last.losses))]
        return self._coarsely(Floor(0.0, 0.0, 0.0, self._coarse[0], size=max(sizes) if all(sizes) else 0.0))

    def norm(self) -> Floor:
        """Return the floor for the gradient norm."""

        def far(total: Sums) -> float:
            return scalar_error(self._reference.norm(total), self._last.norm or 0.0)

        permutation, rounding = far(self._reversed_total), far(self._apart_total)
        if self.obstacle:
            nudged = self._excuse(far(self._nudged_total or self._apart_total))
            floor = default_floor(self._precision, permutation=permutation, nudged=nudged)
        else:
            floor = self._coarsely(Floor(permutation, rounding, 0.0, self._coarse[0]))
        wide = precision_among(one for one in self._last.gradients.values() if one is not None)
        coarse = wide.unit < floor.precision.unit
        return replace(floor, sums=Floor(permutation, 0.0, 0.0, wide)) if coarse else floor

    def worst(self) -> float:
        """Return the largest floor over all gradients."""
        floors = (self.gradient(site) for site in self._last.gradients)
        return max((floor.largest for floor in floors if not floor.noise), default=0.0)
