"""How far the smallest faults lie above rounding: measured, in decades."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from least_faults import FAULTS, NARROW, LeastFault, Step, Total
from torch import Tensor

from pipeproof.core.floors import Floors
from pipeproof.core.judge import one_thread
from pipeproof.core.tolerance import Floor, error, same_bits
from pipeproof.core.updates import Pending
from pipeproof.own.stages import owners
from pipeproof.reference.data import Batch, Shapes, microbatches
from pipeproof.reference.model import DTYPES, build_model
from pipeproof.reference.step import Recipe, Reference, Site

SPLIT = (1, 1, 1, 1)  # a layer a stage
_RECIPE = Recipe(loss="tokens")
_SHAPES = Shapes(ragged=True, unequal=True)


@dataclass(frozen=True)
class Gap:
    """The variant of a fault that is hardest to see, in the tensor in which it is easiest to see.

    effect: how much it changes that tensor, relative, computed in fp64. floor: what rounding alone does to it.
    outcome: what tier B makes of such errors in all gradients, for the variant that it treats most kindly. unseen: how
    many of the ``variants`` leave every bit of every gradient as it was, so that tier A cannot see them.
    """

    effect: float
    floor: float
    outcome: str
    unseen: int
    variants: int

    @property
    def decades(self) -> float:
        """Of the effect over the floor; negative where rounding is larger."""
        return math.log10(self.effect / self.floor) if self.effect else -math.inf


@dataclass(frozen=True)
class Row:
    """The largest floors over all gradients, and every fault's gap; None where it is no fault or cannot be."""

    model: str
    dtype: str
    microbatches: int
    permutation: float
    rounding: float
    gaps: Mapping[str, Gap | None]


def measured(model: str, *, dtype: str, count: int, seed: int = 0) -> Row:
    """Measure ``model`` with four layers in as many stages and ``count`` microbatches of unequal lengths and tokens."""
    batches = microbatches(model, count=count, shapes=_SHAPES, seed=seed)
    narrow = [batch.cast(DTYPES[dtype]) for batch in batches]
    with one_thread():
        floors = _floors(model, dtype, narrow, seed)
        own, wide = _step(model, dtype, narrow, seed), _widened(_step(model, dtype, narrow, seed))
        gaps = {fault.name: _gap(fault, own, wide, floors) for fault in FAULTS}
    permutation = max(floor.permutation for floor in floors.values())
    rounding = max(floor.rounding for floor in floors.values())
    return Row(model, dtype, count, permutation, rounding, gaps)


def _step(model: str, dtype: str, batches: list[Batch], seed: int) -> Step:
    built = build_model(model, layers=len(SPLIT), seed=seed, dtype=dtype)
    owner = owners(built, SPLIT)
    return Step(Reference(built, owner=owner, recipe=_RECIPE), owner, batches, _RECIPE)


def _widened(step: Step) -> Step:
    """The same weights and microbatches in fp64."""
    reference = Reference(step.reference.model.double(), owner=step.owner, recipe=step.recipe)
    return replace(step, reference=reference, batches=[batch.cast(torch.float64) for batch in step.batches])


def _floors(model: str, dtype: str, batches: list[Batch], seed: int) -> dict[Site, Floor]:
    reference = _step(model, dtype, batches, seed).reference
    orders = dict.fromkeys(range(len(SPLIT)), range(len(batches)))
    expected = reference.perform("train", batches, orders=orders)
    floors = Floors(reference, [Pending(expected, batches, orders)])
    return {site: floors.gradient(site) for site, gradient in expected.gradients.items() if gradient is not None}


def _gap(fault: LeastFault, own: Step, wide: Step, floors: Mapping[Site, Floor]) -> Gap | None:
    if fault.rounds and any(gradient is not None and gradient.dtype is NARROW for gradient in own.right.values()):
        return None
    unseen = [_all_equal(total, own.right) for total in fault.totals(own)]
    found = [_errors(total, wide.right, floors) for total in fault.totals(wide)]
    if not found:
        return None
    effect, floor = min((max(errors, key=_above) for errors in found), key=_above)
    outcomes = [{floor.outcome(size) for size, floor in errors} for errors in found]
    kindest = next(outcome for outcome in ("pass", "unknown", "fail") if outcome in map(_overall, outcomes))
    return Gap(effect, _least(floor), kindest, sum(unseen), len(unseen))


def _all_equal(total: Total, right: Total) -> bool:
    return all(same_bits(observed, wanted) for _, observed, wanted in _changed(total, right))


def _errors(total: Total, right: Total, floors: Mapping[Site, Floor]) -> list[tuple[float, Floor]]:
    """The error and the floor of every gradient that is touched."""
    return [(error(observed, wanted), floors[site]) for site, observed, wanted in _changed(total, right)]


def _above(pair: tuple[float, Floor]) -> float:
    size, floor = pair
    return size / _least(floor)


def _overall(outcomes: set[str]) -> str:
    return next(outcome for outcome in ("fail", "unknown", "pass") if outcome in outcomes)


def _changed(total: Total, right: Total) -> Iterator[tuple[Site, Tensor, Tensor]]:
    for site, wanted in right.items():
        observed = total[site]
        if observed is not wanted and observed is not None and wanted is not None:
            yield site, observed, wanted


def _least(floor: Floor) -> float:
    """A floor of nothing at all (one microbatch; luck) is still a unit of rounding."""
    return max(floor.largest, floor.precision.unit)
