"""How far apart two tensors are, and how far apart rounding alone may put them, measured on this very run.

Sources: the metric is TTrace's relative Frobenius error (arXiv 2506.09280) beside the largest difference over the
largest element; elementwise tolerances and ULPs say nothing about gradients, whose elements cancel near zero.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

UNIT = 2.0**-24  # the unit roundoff of fp32
FACTOR = 16.0  # how many floors are still rounding
LEAST = 32 * UNIT  # about 2e-6: a floor measured as zero still leaves this much
MOST = 1e-4  # no floor, however large, excuses more
_PIECE = 1 << 14  # elements that are compared at once


@dataclass(frozen=True)
class Floor:
    """What rounding alone does to one tensor on this run, as relative errors.

    permutation: contributions added in reverse order. double: fp32 against fp64. fault: the least that dropping one
    microbatch would change; an error between ``limit`` and half of this proves neither rounding nor a fault.
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

    def outcome(self, error: float) -> str:
        """``pass``, ``fail``, or ``unknown``: too large for rounding and too small for a lost microbatch."""
        blind = 0 < self.fault / 2 <= self.limit  # rounding could hide a lost microbatch
        if error <= self.limit:
            return "unknown" if blind else "pass"
        return "unknown" if error < self.fault / 2 else "fail"


def same_bits(observed: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are equal bit for bit, signs of zero and NaNs included."""
    if observed.shape != expected.shape or observed.dtype != expected.dtype:
        return False
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.element_size()]
    return torch.equal(observed.contiguous().view(words), expected.contiguous().view(words))


def error(observed: Tensor, expected: Tensor, *, base: Tensor | None = None, rounded: bool = False) -> float:
    """The larger of |o - e| / |e - b| in the Frobenius and in the maximum norm, in fp64; b is ``base``, or zero.

    ``rounded``: a unit in the last place of each element is no difference, for that is what storing it may do.
    0 where both are zero; infinite where only the divisor is, where shapes differ, or where something is not finite.
    """
    if observed.shape != expected.shape:
        return float("inf")
    squares, largest = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    unit = torch.finfo(expected.dtype).eps if rounded else 0.0
    for one, wanted, *origin in pieces(observed, expected, *([] if base is None else [base])):
        difference = ((one - wanted).abs() - unit * wanted.abs()).clamp(min=0)
        pair = (difference, wanted - origin[0] if origin else wanted)
        squares += torch.stack([each.square().sum() for each in pair])
        largest = torch.maximum(largest, torch.stack([each.abs().amax() for each in pair]))
    return max(_ratio(*squares.sqrt()), _ratio(*largest))


def pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one shape side by side, flat and in fp64, piece by piece: whole ones would take much memory."""
    flat = [tensor.detach().reshape(-1) for tensor in tensors]
    for start in range(0, max(1, flat[0].numel()), _PIECE):
        yield tuple(tensor[start : start + _PIECE].double().cpu() for tensor in flat)


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
