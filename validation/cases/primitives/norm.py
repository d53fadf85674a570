"""The norm of all gradients, whichever ranks have which part of them."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from pipeproof.cases.primitives.experts import is_expert


def norm_of(stages: Iterable[nn.Module], mesh: DeviceMesh) -> float:
    """The same on every rank of ``mesh``: each gradient counts once, however many ranks have it or a part of it."""
    own, of_experts = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if parameter.grad is not None:
                (of_experts if is_expert(name) else own).add_(square(parameter.grad))
    total = own + summed_along("ep", of_experts, mesh)
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
