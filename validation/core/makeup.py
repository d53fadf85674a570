"""How often each microbatch is in a sum, where rounding is so coarse that the size of an error alone does not tell.

A lost microbatch changes a sum along what that microbatch gives. Rounding changes it in all directions, and hardly
along that one. So least squares tell the two apart where their sizes do not.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeproof.core.limits import APART, HALF
from pipeproof.core.tolerance import pieces


@dataclass(frozen=True)
class Makeup:
    """``parts``: what each microbatch gives to a sum. ``moved``: how much of one rounding alone may seem to move."""

    parts: tuple[Tensor, ...]
    moved: float

    @classmethod
    def measured(
        cls, expected: Tensor, others: Iterable[Tensor], parts: Sequence[Tensor | None], *, factor: float
    ) -> "Makeup":
        """``others`` are the same sum rounded otherwise; ``factor``: how many times as far others yet may be."""
        given = tuple(part for part in parts if part is not None and part.any())
        return cls(given, factor * max((most_of(other, expected, given) for other in others), default=torch.inf))

    def alike(self, observed: Tensor, expected: Tensor) -> bool:
        """Whether each microbatch is in both as often; False where rounding may hide that."""
        return self.moved < HALF and most_of(observed, expected, self.parts) < HALF


def most_of(one: Tensor, other: Tensor, parts: Sequence[Tensor]) -> float:
    """How much of any one of ``parts`` is in the difference of two tensors of their shape, by least squares in fp64.

    Infinite where they are not told apart.
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
