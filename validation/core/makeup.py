"""Count each microbatch's share in a sum, where coarse rounding hides it from error sizes.

A lost microbatch changes a sum along that microbatch's contribution; rounding spreads in all directions. Least squares
separate them.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from pipeproof.core.limits import APART, HALF
from pipeproof.core.tolerance import pieces


def compare_shares(
    expected: Tensor, others: Iterable[Tensor], parts: Sequence[Tensor | None], *, factor: float
) -> Callable[[Tensor, Tensor], bool]:
    """Return a test whether each microbatch has the same share in two sums.

    parts: each microbatch's contribution. Rounding alone may seem to move a share ``factor`` times as far as in
    ``others``, the expected sum rounded otherwise: if that hides a difference, the test is False.
    """
    given = [part for part in parts if part is not None and part.any()]
    moved = factor * max((most_of(other, expected, given) for other in others), default=torch.inf)
    return lambda observed, wanted: moved < HALF and most_of(observed, wanted, given) < HALF


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
