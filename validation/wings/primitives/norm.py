"""The norm of all gradients, whichever ranks have which part of them."""

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from pipeproof.wings.primitives.experts import is_expert


def norm_of(stages: Iterable[nn.Module], mesh: DeviceMesh, *, in_parts: Collection[nn.Parameter] = ()) -> float:
    """The same on every rank of ``mesh``: each gradient counts once, however many ranks have it or a part of it.

    ``in_parts``: parameters that were cut by hand, so that each rank along tp or sp has a part.
    """
    squares = {axis: torch.zeros((), dtype=torch.float64) for axis in ("", "ep", "tp", "sp")}
    by_hand = next((axis for axis in ("tp", "sp") if axis in (mesh.mesh_dim_names or ())), "")
    for stage in stages:
        for name, parameter in stage.named_parameters():
            axis = "ep" if is_expert(name) else by_hand if parameter in in_parts else ""
            if parameter.grad is not None:
                squares[axis] += square(parameter.grad)
    total = sum((summed_along(axis, one, mesh) for axis, one in squares.items()), torch.zeros(()))
    return float(summed_along("pp", total, mesh).sqrt())


def square(gradient: Tensor) -> Tensor:
    """The square of its norm; of a DTensor, of all its shards."""
    found = torch.linalg.vector_norm(gradient, dtype=torch.float64)
    return (found.full_tensor() if isinstance(found, DTensor) else found).cpu() ** 2


def summed_along(axis: str, number: Tensor, mesh: DeviceMesh) -> Tensor:
    """The sum over the ranks along ``axis``, if there is one: they have gradients of their own."""
    if axis in (mesh.mesh_dim_names or ()):
        number = number.to(mesh.device_type)
        dist.all_reduce(number, group=mesh.get_group(axis))
    return number.cpu()
