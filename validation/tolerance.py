"""How far apart two tensors are, and how far apart rounding alone may put them, measured on this very run.

Sources: the metric is TTrace's relative Frobenius error (arXiv 2506.09280) beside the largest difference over the
largest element; elementwise tolerances and ULPs say nothing about gradients, whose elements cancel near zero.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

UNIT = 2.0**-24  # the unit roundoff of fp32
FACTOR = 16.0  # how many floors are still rounding
LEAST = 32 * UNIT  # about 2e-6: a floor measured as zero still leaves this much
MOST = 1e-4  # no floor, however large, excuses more


@dataclass(frozen=True)
class Floor:
    """What rounding alone does to one tensor on this run, as relative errors.

    permutation: contributions added in reverse order. double: fp32 against fp64. fault: the least that dropping one
    microbatch would change. An error between ``limit`` and ``wrong`` proves neither rounding nor a fault.
    """

    permutation: float
    double: float
    fault: float

    @property
    def largest(self) -> float:
        return max(self.permutation, self.double)

    @property
    def limit(self) -> float:
        """The largest error that still counts as rounding."""
        return min(MOST, max(LEAST, FACTOR * self.largest))

    @property
    def wrong(self) -> float:
        """The smallest error that is surely a fault: half a lost microbatch, or what no rounding reaches, if less.

        Floors above the cap come from kinks that precision shifts, so they count here as they were measured.
        """
        return min(self.fault / 2, max(MOST, FACTOR * self.largest))

    def outcome(self, error: float) -> str:
        """``pass``, ``fail``, or ``unknown``: too large for rounding and too small to be surely a fault."""
        blind = 0 < self.fault / 2 <= self.limit  # rounding could hide a lost microbatch
        if error <= self.limit:
            return "unknown" if blind else "pass"
        return "unknown" if error < self.wrong else "fail"


def same_bits(observed: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are equal bit for bit, signs of zero and NaNs included."""
    if observed.shape != expected.shape or observed.dtype != expected.dtype:
        return False
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
    return torch.equal(observed.contiguous().view(words), expected.contiguous().view(words))


def error(observed: Tensor, expected: Tensor, *, scale: Tensor | None = None) -> float:
    """The larger of |o - e| / |s| in the Frobenius and in the maximum norm, in fp64; s is ``scale``, or e itself.

    0 where both are zero; infinite where only the scale is, where shapes differ, or where something is not finite.
    """
    if observed.shape != expected.shape:
        return float("inf")
    difference = observed.double() - expected.double()
    against = (expected if scale is None else scale).double()
    ratios = [_ratio(difference.norm(), against.norm()), _ratio(difference.abs().amax(), against.abs().amax())]
    return max(ratios)


def scalar_error(observed: float, expected: float) -> float:
    """|o - e| / |e|."""
    return error(torch.tensor(observed, dtype=torch.float64), torch.tensor(expected, dtype=torch.float64))


def floor_of(expected: Tensor, others: Sequence[Tensor], double: Tensor, parts: Sequence[Tensor | None]) -> Floor:
    """The floor of a sum: ``others`` are the same sum in other orders, ``double`` in fp64, ``parts`` its summands."""
    permutation = max((error(other, expected) for other in others), default=0.0)
    size = expected.double().norm()
    fault = min((_ratio(part.double().norm(), size) for part in parts if part is not None), default=0.0)
    return Floor(permutation, error(expected, double), fault)


def _ratio(top: Tensor, bottom: Tensor) -> float:
    if top.item() == 0.0:
        return 0.0
    value = top.item() / bottom.item() if bottom.item() else float("inf")
    return value if value == value else float("inf")
