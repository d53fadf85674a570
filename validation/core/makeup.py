"""Count each microbatch's share in a sum, where coarse rounding hides it from error sizes.

A lost microbatch changes a sum along that microbatch's contribution; rounding spreads in all directions. Least squares
separate them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeproof.core.limits import APART, HALF
from pipeproof.core.tolerance import pieces


@dataclass(frozen=True)
class Makeup:
    """parts: each microbatch's contribution to a sum. moved: share that rounding alone may seem to move."""

    parts: tuple[Tensor, ...]
    moved: float

    @classmethod
    def measure(
        cls, expected: Tensor, others: Iterable[Tensor], parts: Sequence[Tensor | None], *, factor: float
    ) -> "Makeup":
        """Measure ``moved`` on ``others``, the same sum rounded otherwise, times ``factor``."""
        given = tuple(part for part in parts if part is not None and part.any())
        return cls(given, factor * max((most_of(other, expected, given) for other in others), default=torch.inf))

    def is_alike(self, observed: Tensor, expected: Tensor) -> bool:
        """True if each microbatch has the same share in both. False if rounding may hide a difference."""
        return self.moved < HALF and most_of(observed, expected, self.parts) < HALF


def most_of(one: Tensor, other: Tensor, parts: Sequence[Tensor]) -> float:
    """Return the largest coefficient of ``parts`` in the tensors' difference, by least squares in fp64.

    Infinite if parts are linearly dependent.
    """
    count = len(parts)
    if not count:
        return torch.inf
    products, along = torch.zeros(count, count, dtype=torch.float64), torch.zeros(count, dtype=torch.float64)
    for mine, its, *rows in pieces(one, other, *parts):
        stacked = torch.stack(rows)  # (M, D)
        products += (stacked @ stacked.T).cpu()
        along += (stacked @ (mine - its)).cpu()
    norms = products.diagonal().sqrt()
    if not bool(products.isfinite().all()) or not bool(norms.all()):
        return torch.inf
    unit = products / norms / norms[:, None]
    values = torch.linalg.eigvalsh(unit)
    if values[0] <= APART * values[-1]:
        return torch.inf
    return float((torch.linalg.solve(unit, along / norms) / norms).abs().max())
