"""Tensors of one shape and type, and which of them another one is near to.

Comparing with every one of them takes long. Two tensors that are near each other are so in any few elements.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from validation.judging.tolerance import error

_FEW = 256
_TELLING = 0.25  # where rounding may have made more of a tensor than that, it is like any other
_ROUNDING = 1 + 1e-12  # of the comparison itself


class Likes:
    """Tensors (N) of one shape and type, none of them zero."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def near(self, seen: Tensor, limit: float, *, size: float = 0.0) -> Iterator[int]:
        """Those within ``limit`` of ``seen``, relative to their size, or to ``size`` where that is larger."""
        limits = limit * (size / self._largest).clamp_min(1.0)
        gaps = (self._few - _few(seen)).abs().amax(dim=1)
        told = limits <= _TELLING
        likely = ((gaps <= limits * self._largest * _ROUNDING) & told).nonzero().flatten().tolist()
        return (k for k in likely if error(seen, self._tensors[k]) <= limits[k].item())

    @cached_property
    def _few(self) -> Tensor:
        """The same few elements of each (N, K)."""
        return torch.stack([_few(tensor) for tensor in self._tensors])

    @cached_property
    def _largest(self) -> Tensor:
        """The largest element of each (N)."""
        return torch.stack([tensor.abs().amax().double() for tensor in self._tensors])


def _few(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)[:: max(1, tensor.numel() // _FEW)].double()
