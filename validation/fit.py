"""Least squares: of which multiples of known parts a tensor is the sum, and what is left over."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_EXPLAINED = 1e-4  # a residual below this share is rounding; leaving a part out leaves far more


@dataclass(frozen=True)
class Fit:
    """The coefficient of every part, and the residual relative to the whole."""

    coefficients: tuple[float, ...]
    residual: float

    @property
    def explains(self) -> bool:
        """Whether the parts make up the whole."""
        return self.residual <= _EXPLAINED


def fit(whole: Tensor, parts: Sequence[Tensor]) -> Fit | None:
    """Solve ``whole`` = sum of c_k ``parts[k]``, fp64, one dimension each; None where that is not decided.

    Undecided: more parts than elements, parts that are not independent, nothing there, or something not finite.
    """
    size = float(whole.norm())
    if len(parts) > len(whole) or not size or size != size or size == float("inf"):
        return None
    matrix = torch.stack(list(parts), dim=1)
    scale = matrix.norm(dim=0)
    if not bool((scale > 0).all()):
        return None
    matrix = matrix / scale
    smallest = float(torch.linalg.svdvals(matrix.T @ matrix)[-1])
    if smallest < 1e-9:
        return None
    solution = torch.linalg.lstsq(matrix, whole.unsqueeze(1)).solution.squeeze(1)
    residual = float((whole - matrix @ solution).norm()) / size
    return Fit(tuple((solution / scale).tolist()), residual)
