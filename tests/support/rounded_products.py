"""A processor that rounds the factors of its products of fp32, as accelerators do."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from pipeproof.reference.products import sort_of


class Rounded(TorchDispatchMode):  # type: ignore[no-untyped-call]  # in torch
    """While it is open, factors have so many ``bits`` behind the first; ``only`` in products of this sort, if named."""

    def __init__(self, bits: int, *, only: str = "") -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # in torch
        self._drop, self._only = 23 - bits, only

    def __torch_dispatch__(self, func: Any, types: Any, *given: Any) -> Any:
        args, kwargs = (*given, {})[:2]
        if (sort := sort_of(func)) and self._only in ("", sort):
            args = tree_map_only(Tensor, self._rounded, args)
        return func(*args, **(kwargs or {}))

    def _rounded(self, factor: Tensor) -> Tensor:
        if factor.dtype is not torch.float32 or not self._drop:
            return factor
        place = 1 << self._drop
        return ((factor.contiguous().view(torch.int32) + place // 2) & ~(place - 1)).view(torch.float32)
