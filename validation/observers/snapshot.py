"""Copies of all gradients of a stage at once: taken after every action, so they must cost little."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import is_

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

Named = Sequence[tuple[str, nn.Parameter]]
Held = Sequence[Tensor | None]  # the gradients that parameters have, themselves


@dataclass(frozen=True)
class Snapshot:
    """What ``tensors`` of one form held: all of one type laid end to end, which is one copy for all.

    ``dtypes`` has None where there was none. The copies are where the tensors were: on a GPU nothing waits for them.
    """

    dtypes: Sequence[torch.dtype | None]
    flat: Mapping[torch.dtype, Tensor]

    @classmethod
    def of(cls, tensors: Held) -> "Snapshot":
        """What ``tensors`` hold now."""
        dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        flat = {
            dtype: _laid_out([tensor for tensor in tensors if tensor is not None and tensor.dtype is dtype])
            for dtype in set(dtypes)
            if dtype is not None
        }
        return cls(dtypes, flat)

    def tensors(self, named: Named) -> dict[str, Tensor | None]:
        """By name, as they were, on the CPU; ``named`` are the parameters that they belong to, of the same shapes."""
        found: dict[str, Tensor | None] = dict.fromkeys(name for name, _ in named)
        for dtype, flat in self.flat.items():
            own = [one for one, held in zip(named, self.dtypes, strict=True) if held is dtype]
            parts = _unflatten_dense_tensors(flat.cpu(), [parameter for _, parameter in own])  # type: ignore[no-untyped-call]  # in torch
            found |= zip((name for name, _ in own), parts, strict=True)
        return found


@dataclass(frozen=True)
class Mark:
    """Which gradients there were, and how often each had been written to: tells whether anybody touched them since."""

    tensors: Held
    versions: Sequence[int]

    @classmethod
    def of(cls, tensors: Held) -> "Mark":
        """A mark of ``tensors``, which it keeps: no other tensor can come to be in the place of one let go."""
        return cls(tensors, [tensor._version for tensor in tensors if tensor is not None])

    def stands(self, tensors: Held) -> bool:
        """Whether ``tensors`` are those of the mark and nothing was written to them, as far as torch counts writes."""
        same = len(tensors) == len(self.tensors) and all(map(is_, tensors, self.tensors))
        return same and self.versions == [tensor._version for tensor in tensors if tensor is not None]


def gradients(named: Named) -> Held:
    """The gradients that parameters have."""
    return [parameter.grad for _, parameter in named]


def parameters(named: Named) -> Snapshot:
    """What the parameters themselves hold."""
    return Snapshot.of([parameter.detach() for _, parameter in named])


def _laid_out(tensors: Sequence[Tensor]) -> Tensor:
    """``tensors`` end to end, in a storage of their own: one alone would be given back as it is."""
    flat: Tensor = _flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]  # in torch
    return flat if len(tensors) > 1 else flat.clone()
