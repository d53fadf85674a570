"""Copies of all gradients of a stage at once: taken after every action, so they must cost little."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Named = Sequence[tuple[str, nn.Parameter]]
Versions = tuple[tuple[int, int] | None, ...]


@dataclass(frozen=True)
class Snapshot:
    """Tensors by name, None where there was none: all of one type laid end to end, which is one copy for all."""

    shapes: tuple[tuple[str, torch.Size | None, torch.dtype | None], ...]
    flat: Mapping[torch.dtype, Tensor]

    @classmethod
    def of(cls, named: Sequence[tuple[str, Tensor | None]]) -> "Snapshot":
        """What ``named`` holds now."""
        shapes = list[tuple[str, torch.Size | None, torch.dtype | None]]()
        parts = dict[torch.dtype, list[Tensor]]()
        for name, tensor in named:
            if tensor is None:
                shapes.append((name, None, None))
            else:
                shapes.append((name, tensor.shape, tensor.dtype))
                parts.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
        return cls(tuple(shapes), {dtype: torch.cat(own).to("cpu") for dtype, own in parts.items()})

    def tensors(self) -> dict[str, Tensor | None]:
        """By name, as they were."""
        at, found = dict.fromkeys(self.flat, 0), dict[str, Tensor | None]()
        for name, shape, dtype in self.shapes:
            if shape is None or dtype is None:
                found[name] = None
                continue
            end = at[dtype] + shape.numel()
            found[name] = self.flat[dtype][at[dtype] : end].view(shape)
            at[dtype] = end
        return found


def gradients(named: Named) -> Snapshot:
    """The gradients of parameters."""
    return Snapshot.of([(name, parameter.grad) for name, parameter in named])


def parameters(named: Named) -> Snapshot:
    """The parameters themselves."""
    return Snapshot.of([(name, parameter.detach()) for name, parameter in named])


def versions(named: Named) -> Versions:
    """Which gradients there are, and how often each was written to; alike where nothing touched them."""
    held = [parameter.grad for _, parameter in named]
    return tuple([None if tensor is None else (id(tensor), tensor._version) for tensor in held])
