"""Norm of all gradients, for any distribution over ranks."""

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from pipeproof.wings.primitives.experts import is_expert


def norm_of(stages: Iterable[nn.Module], mesh: DeviceMesh, *, in_parts: Collection[nn.Parameter] = ()) -> float:
    """Compute the norm, equal on every rank of ``mesh``: each gradient counts once, whole or in parts.

    ``in_parts``: parameters cut by hand along tp or sp.
    """
    squares = {axis: torch.zeros((), dtype=torch.float64) for axis in ("", "ep", "tp", "sp")}
    by_hand = next((axis for axis in ("tp", "sp") if axis in (mesh.mesh_dim_names or ())), "")
    for stage in stages:
        for name, parameter in stage.named_parameters():
            axis = "ep" if is_expert(name) else by_hand if parameter in in_parts else ""
            if parameter.grad is not None:
                squares[axis] += square(parameter.grad)
    total = sum((sum_along(axis, one, mesh) for axis, one in squares.items()), torch.zeros(()))
    return float(sum_along("pp", total, mesh).sqrt())


def square(gradient: Tensor) -> Tensor:
    """Return the square of the norm; for a DTensor, over all shards."""
    found = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    return (found.full_tensor() if isinstance(found, DTensor) else found).cpu() ** 2


def sum_along(axis: str, number: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum along ``axis``, if present, where ranks have separate gradients."""
    if axis in (mesh.mesh_dim_names or ()):
        number = number.to(mesh.device_type)
        dist.all_reduce(number, group=mesh.get_group(axis))
    return number.cpu()
