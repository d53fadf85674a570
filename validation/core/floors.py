"""What rounding alone does to everything that a step gives, measured on this very run."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from itertools import product
from statistics import median

import torch
from torch import Tensor

from pipeproof.core.limits import (
    BY_NAME,
    DRAWS,
    FP32,
    FP64,
    HARDLY,
    Precision,
    coarsest,
    precision_among,
    precision_of,
)
from pipeproof.core.makeup import Makeup
from pipeproof.core.nudged import Nudged, Sums
from pipeproof.core.observe.elements import is_rounded
from pipeproof.core.tolerance import (
    Floor,
    error,
    floor_of,
    in_both,
    rounding_of,
    scalar_error,
    unmeasured,
)
from pipeproof.core.updates import Pending, Updates, gradients_off
from pipeproof.core.verdict import raised
from pipeproof.reference.accumulation import PLAIN, Accumulation
from pipeproof.reference.data import Batch
from pipeproof.reference.otherwise import Made, in_double, made_of, one_place_off
from pipeproof.reference.step import Contribution, Expected, Gradient, Reference, Site

Contributions = Sequence[tuple[Contribution, ...]]  # of each operation, by microbatch
Otherwise = Callable[[Reference, Expected, Sequence[Batch]], tuple[Contribution, ...]]


class Floors:
    """The floors of one update, measured when first asked for; most runs are bitwise and never ask.

    ``pending`` are the operations whose gradients the update sums; the last is the update itself. ``obstacle`` says
    why fp64 told nothing, once that is known. Then only what other orders of addition explain may pass: that is less
    than would pass otherwise. ``updated``: what the optimizer makes of the parameters with other gradients; without it
    an update is as near as its gradient.
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
        self._accumulation = reference.recipe.accumulation
        self._precision = precision_among(reference.model.parameters())
        # Nothing is wider than fp64; there it is the weights that are rounded once more (as TTrace does with inputs).
        self._otherwise = one_place_off if self._precision is FP64 else in_double
        self.obstacle = ""
        self._computed_in: Precision | None = None  # what nudged numbers are rounded as, if more coarsely
        self._wide: dict[torch.dtype, Sums] = {}

    @cached_property
    def _apart(self) -> Contributions:
        """What each operation's microbatches give where numbers are rounded otherwise; as they are where none tells.

        Where the reference computes in a narrower type than that of its weights, gradients are no farther apart than
        that type rounds: those of a model that draws otherwise in fp64 are.
        """
        narrow = self._narrowest
        found, why = self._computed(self._otherwise, most=narrow.most)
        if found is not None and narrow.unit > self._precision.unit:
            pairs = zip(self._last.contributions, found[-1], strict=True)
            gaps = [error(one, two) for own, other in pairs for one, two in in_both(own.gradients, other.gradients)]
            if not gaps or median(gaps) > narrow.most:
                found, why = None, "gives other gradients"
        if found is None:
            self.obstacle = f"rounding was not measured against fp64: there the reference {why}"
        return found or [one.expected.contributions for one in self._pending]

    @property
    def _tells(self) -> bool:
        """Whether other rounding tells anything."""
        return bool(self._apart) and not self.obstacle

    @cached_property
    def _nudged(self) -> Contributions | None:
        """The same with other weights, one rounding off; of the narrowest type, where fp64 told nothing of that."""
        if self._otherwise is one_place_off:
            return None
        narrow = self._narrowest
        if not self._tells and narrow.unit > self._precision.unit:
            found, _ = self._computed(partial(one_place_off, unit=narrow.unit), most=narrow.most)
            if found is not None:
                self._computed_in = narrow
                return found
        return self._computed(one_place_off, most=math.inf if self._tells else self._precision.most)[0]

    @cached_property
    def _coarse(self) -> Precision:
        """How what the reference computes is rounded: more coarsely than its weights, as under autocast, if fp64 told.

        Little of it may be computed in the narrow type. So what passes there in any case does not pass here unless that
        much was measured.
        """
        own, narrow = self._precision, self._narrowest
        told = self._otherwise is in_double and self._tells
        coarse = told and narrow.unit > own.unit and own.factor * self._coarseness > own.most
        return replace(narrow, least=own.most, most=narrow.least) if coarse else own

    @cached_property
    def _coarseness(self) -> float:
        """What rounding does to half of the gradients: to a single number it may do little by chance."""
        found = [error(one, apart) for one, apart in in_both(self._last.gradients, self._apart_total)]
        return median([size for size in found if size < math.inf] or [0.0])

    def _coarsely(self, floor: Floor) -> Floor:
        """``floor`` where it is ``_coarse``."""
        if floor.noise or self._coarse is self._precision:
            return floor
        return replace(floor, rounding=max(floor.rounding, self._coarseness))

    @cached_property
    def _narrowest(self) -> Precision:
        """How the narrowest type that the reference computes in rounds."""
        products = (BY_NAME[one] for one in self.products.values())
        return coarsest([self._precision, *map(precision_of, self._made.types), *products])

    @property
    def products(self) -> Mapping[str, str]:
        """As what products of fp32 are rounded, by their sort."""
        return self._made.products

    @cached_property
    def _made(self) -> Made:
        try:
            return made_of(self._reference, self._last, self._pending[-1].batches)
        except Exception:  # the user's code may not run once more
            return Made()

    @cached_property
    def moved(self) -> Nudged | None:
        """How far weights that are one rounding off move all of it; None where no narrow type is computed in."""
        if (narrow := self._narrowest).unit <= FP32.unit:
            return None
        off, ways = partial(one_place_off, unit=2 * narrow.unit), product(range(DRAWS), (1, -1))
        made = (self._computed(partial(off, draw=draw, way=way), most=math.inf)[0] for draw, way in ways)
        totals = ((self._total(one), [m.loss for m in one[-1]]) for one in made if one is not None)
        due, norm, least = self._last, self._reference.norm, self._precision.least
        updated = self._updated if due.parameters else None  # else what is due follows from the very gradients
        return Nudged.measured(due, totals, unit=narrow.unit, least=least, norm=norm, updated=updated)

    def _excused(self, gap: float) -> float:
        """How much of the gap to nudged numbers may be rounding, as a floor that is multiplied by our own factor."""
        own, narrow = self._precision, self._computed_in
        return gap if narrow is None else max(narrow.factor * gap, narrow.least) / own.factor

    def _computed(self, otherwise: Otherwise, *, most: float) -> tuple[Contributions | None, str]:
        """All contributions computed ``otherwise``, or None and why they tell nothing: it is the user's code.

        ``most``: how far losses may be off; infinite where they are known to be the same but for rounding.
        """
        try:
            found = [otherwise(self._of(one), one.expected, one.batches) for one in self._pending]
        except Exception as error:
            return None, f"raised {raised(error)}"
        own = [one.expected.contributions for one in self._pending]
        nothing = HARDLY * max(abs(one.loss) for some in own for one in some)
        # A model that draws otherwise in another precision, as dropout does, says nothing about rounding there.
        alike = most == math.inf or all(
            scalar_error(one.loss, other.loss) <= most or abs(other.loss) <= nothing
            for pair in zip(own, found, strict=True)
            for one, other in zip(*pair, strict=True)
        )
        return (found, "") if alike else (None, "gives other losses")

    @cached_property
    def _reversed_total(self) -> Sums:
        sums: Sums = {}
        for one in reversed(self._pending):
            orders = {stage: tuple(reversed(order)) for stage, order in one.orders.items()}
            sums = self._of(one).accumulate(one.expected.contributions, orders=orders, onto=sums)
        return self._reference.total(sums)

    @cached_property
    def _apart_total(self) -> Sums:
        # In the types that these are in: no other is to round what is measured.
        return self._total(self._apart, by=PLAIN)

    @cached_property
    def _nudged_total(self) -> Sums:
        return {} if self._nudged is None else self._total(self._nudged)

    def _total(self, made: Contributions, *, by: Accumulation | None = None) -> Sums:
        sums: Sums = {}
        for one, contributions in zip(self._pending, made, strict=True):
            own = self._of(one)
            how = by and replace(by, shares=own.recipe.accumulation.shares)
            sums = own.accumulate(contributions, orders=one.orders, onto=sums, by=how)
        return self._reference.total(sums)

    def gradient(self, site: Site) -> Floor:
        """The floor of one site's gradient."""
        expected, other, apart = self._last.gradients[site], self._reversed_total[site], self._apart_total[site]
        if expected is None or other is None or apart is None:
            return Floor(0.0, 0.0, 0.0, self._precision)
        again, parts = partial(self._again, site), self._parts(site)
        floor = floor_of(expected, [other], apart, parts, again=again, computed=self._coarse)
        floor = self._coarsely(floor)
        nudged = self._again(site) if self.obstacle else None
        return floor if nudged is None else replace(floor, nudged=self._excused(error(expected, nudged)))

    def gradient_by_microbatch(self, site: Site) -> Floor:
        """The same, which also tells whether each microbatch is there where rounding is as large as half of one."""
        blind = (floor := self.gradient(site)).blind and not self.obstacle
        return replace(floor, alike=self._makeup(site).alike) if blind else floor

    def _parts(self, site: Site) -> list[Gradient]:
        """What each microbatch gives, in every stage that has a copy."""
        late, homes = self._reference.late, self._reference.homes(site)
        contributions = [one for pending in self._pending for one in pending.expected.contributions]
        parts = [one.gradients[home] for one in contributions for home in homes]
        return [None if part is None else part / late for part in parts]

    def _of(self, pending: Pending) -> Reference:
        """The reference that has what ``pending`` gives."""
        return pending.reference or self._reference

    def _makeup(self, site: Site) -> Makeup:
        """What the gradient at ``site``, where there is one, is made of, and how well that can be told."""
        totals = [total[site] for total in (self._last.gradients, self._reversed_total, self._apart_total)]
        expected, *others = [total for total in totals if total is not None]
        return Makeup.measured(expected, others, self._parts(site), factor=self._precision.factor)

    def settled(self, site: Site) -> Floor:
        """The floor of what the optimizer makes of one parameter with the very gradient that it was given."""
        floor = replace(self.gradient(site), sums=None)  # an update has no more digits than the parameter
        if self._updated is None or floor.noise or site not in self._due:
            return floor
        # Fused kernels have settings in fp32: one less beta to the second has few digits then.
        settled = self._moved(site, self._settled) / floor.precision.factor
        return replace(floor, rounding=max(floor.rounding, settled))

    def update(self, site: Site) -> Floor:
        """The floor of what is made of one parameter, by a gradient that is the reference's but for rounding.

        What the optimizer makes of other gradients within their limits is no proof of a fault, however far it leads.
        """
        floor = self.settled(site)
        if self._updated is None or floor.noise or site not in self._due:
            return floor
        far = max(self._moved(site, parameters) for parameters in self._off)
        return replace(floor, nudged=max(floor.nudged, far / floor.precision.factor))

    @cached_property
    def _off(self) -> Sequence[Mapping[Site, Tensor]]:
        """The parameters as gradients that are off as far as their floors allow would make them."""
        assert self._updated is not None, "asked for only where there is an optimizer"
        due = self._last.gradients
        floors = {site: self.gradient(site) for site in due}
        made = gradients_off(due, floors, there=self._apart_total)
        return [self._updated(one, norm=self._last.norm) for one in made]

    @cached_property
    def _settled(self) -> Mapping[Site, Tensor]:
        """The parameters as the optimizer would make them with settings that are one rounding of fp32 off."""
        assert self._updated is not None, "asked for only where there is an optimizer"
        return self._updated(self._last.gradients, norm=self._last.norm, off=FP32.unit)

    def _moved(self, site: Site, parameters: Mapping[Site, Tensor]) -> float:
        """How far apart two updates are, relative to the one that is due."""
        return error(parameters[site], self._due[site], base=self._last.before[site[1]], rounded=True)

    @cached_property
    def _due(self) -> Mapping[Site, Tensor]:
        if self._last.parameters or self._updated is None:
            return self._last.parameters
        return self._updated(self._last.gradients, norm=self._last.norm)

    def _again(self, site: Site) -> Gradient:
        return self._nudged_total.get(site)

    def added_in(self, dtype: torch.dtype, site: Site) -> Tensor | None:
        """One site's gradient, if what the microbatches give is added up in ``dtype``."""
        if dtype not in self._wide:
            by = replace(self._accumulation, dtype=dtype)
            self._wide[dtype] = self._total([one.expected.contributions for one in self._pending], by=by)
        return self._wide[dtype][site]

    def loss(self, microbatch: int) -> Floor:
        """The floor of one microbatch's loss."""
        own, apart = self._last.losses[microbatch], self._apart[-1][microbatch].loss

        def again() -> Tensor | None:
            return None if self._nudged is None else _number(self._nudged[-1][microbatch].loss)

        if not self.obstacle:
            floor = rounding_of(_number(own), _number(apart), again=again, precision=self._coarse)
            floor = replace(floor, rounding=max(floor.rounding, self._usual)) if not floor.noise else floor
            return self._coarsely(floor)
        other = again()
        return unmeasured(self._precision, nudged=0.0 if other is None else self._excused(error(_number(own), other)))

    @cached_property
    def _usual(self) -> float:
        """What rounding does to half of the losses: to a single one it may do little by chance."""
        pairs = zip(self._last.losses, self._apart[-1], strict=True)
        return median(scalar_error(own, apart.loss) for own, apart in pairs)

    def output(self, microbatch: int, name: str) -> Floor:
        """The floor of what a microbatch puts out under a name."""
        return self._of_tensor(microbatch, lambda one: one.outputs[name], most=self._coarse)

    def scores(self, microbatch: int, router: str, number: int) -> Floor:
        """The floor of the scores by which a router makes its choice of this number for a microbatch.

        Where the model computes in a coarser type, they are as coarse, whatever type they are in.
        """

        def scored(one: Contribution) -> Tensor:
            scores = one.choices[router][number].scores_TE
            return scores.masked_fill(~scores.isfinite(), 0.0)  # what may not be chosen

        return self._of_tensor(microbatch, scored, most=self._coarse)

    def _of_tensor(self, microbatch: int, tensor: Callable[[Contribution], Tensor], *, most: Precision = FP64) -> Floor:
        """The floor of a ``tensor`` of a microbatch, which is as coarse as ``most`` at least."""
        own, apart = tensor(self._last.contributions[microbatch]), tensor(self._apart[-1][microbatch])
        precision = coarsest([precision_of(own.dtype), most])

        def again() -> Tensor | None:
            return None if self._nudged is None else tensor(self._nudged[-1][microbatch])

        if not is_rounded(own.dtype):
            return Floor(0.0, 0.0, 0.0, self._precision)
        if not self.obstacle:
            return rounding_of(own, apart, again=again, precision=precision)
        other = again()
        return unmeasured(precision, nudged=0.0 if other is None else self._excused(error(own, other)))

    def total(self) -> Floor:
        """The floor of what all losses are together: none was measured, but where they are rounding alone."""
        sizes = [self.loss(microbatch).size for microbatch in range(len(self._last.losses))]
        return self._coarsely(Floor(0.0, 0.0, 0.0, self._coarse, size=max(sizes) if all(sizes) else 0.0))

    def norm(self) -> Floor:
        """The floor of the gradient norm."""
        norm = self._last.norm or 0.0
        totals = [self._reversed_total, self._apart_total]
        if self.obstacle:
            totals.append(self._nudged_total or self._apart_total)
        permutation, rounding, *nudged = (scalar_error(self._reference.norm(total), norm) for total in totals)
        floor = self._coarsely(Floor(permutation, rounding, 0.0, self._coarse))
        if nudged:
            floor = unmeasured(self._precision, permutation=permutation, nudged=self._excused(nudged[0]))
        wide = precision_among(one for one in self._last.gradients.values() if one is not None)
        coarse = wide.unit < floor.precision.unit
        return replace(floor, sums=Floor(permutation, 0.0, 0.0, wide)) if coarse else floor

    def worst(self) -> float:
        """The largest floor over all gradients."""
        floors = (self.gradient(site) for site in self._last.gradients)
        return max((floor.largest for floor in floors if not floor.noise), default=0.0)


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)
