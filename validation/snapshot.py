"""Copies of all gradients of a stage at once: taken after every action, so they must cost little."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Named = Sequence[tuple[str, nn.Parameter]]
Versions = tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True)
class Snapshot:
    """Tensors by name, None where there was none: all of one type laid end to end, which is one copy for all.

    ``named`` are the parameters that they belong to, which have their shapes; ``dtypes`` are in the same order.
    """

    named: Named
    dtypes: Sequence[torch.dtype | None]
    flat: Mapping[torch.dtype, Tensor]

    @classmethod
    def of(cls, named: Named, tensors: Sequence[Tensor | None]) -> "Snapshot":
        """What ``tensors`` hold now, one for each of ``named``."""
        dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        flat = {
            dtype: torch.cat([tensor.reshape(-1) for tensor in tensors if tensor is not None and tensor.dtype is dtype])
            for dtype in set(dtypes)
            if dtype is not None
        }
        return cls(named, dtypes, {dtype: tensor.to("cpu") for dtype, tensor in flat.items()})

    def tensors(self) -> dict[str, Tensor | None]:
        """By name, as they were."""
        at, found = dict.fromkeys(self.flat, 0), dict[str, Tensor | None]()
        for (name, parameter), dtype in zip(self.named, self.dtypes, strict=True):
            if dtype is None:
                found[name] = None
                continue
            end = at[dtype] + parameter.numel()
            found[name] = self.flat[dtype][at[dtype] : end].view(parameter.shape)
            at[dtype] = end
        return found


def gradients(named: Named) -> Snapshot:
    """The gradients of parameters."""
    return Snapshot.of(named, [parameter.grad for _, parameter in named])


def parameters(named: Named) -> Snapshot:
    """The parameters themselves."""
    with torch.no_grad():
        return Snapshot.of(named, [parameter for _, parameter in named])


def versions(named: Named) -> Versions:
    """Which gradients there are, and how often each was written to; alike where nothing touched them."""
    held = [parameter.grad for _, parameter in named]
    return tuple([None if tensor is None else (id(tensor), tensor._version) for tensor in held])
