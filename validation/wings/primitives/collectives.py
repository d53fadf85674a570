"""Differentiable collectives in pairs: the forward of one is the backward of the other.

They follow Megatron-LM (Shoeybi and others, 2019, figure 3; Korthikanti and others, 2022, figure 6).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

Collective = Callable[[Tensor, Any, int], Tensor]  # of a tensor, over a group, along a dimension


class Paired(torch.autograd.Function):
    """A collective over ``group`` along ``dim``: ``forth`` in the forward, and ``back`` of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forth: Collective, back: Collective, group: Any, dim: int) -> Tensor:
        """Return the result of ``forth``."""
        ctx.back = back, group, dim
        return forth(x, group, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the result of ``back``."""
        back, group, dim = ctx.back
        return back(gradients[0], group, dim), None, None, None, None


def same(x: Tensor, group: Any, dim: int) -> Tensor:
    """Return ``x``, present on every rank."""
    return x.view_as(x)


def total(x: Tensor, group: Any, dim: int) -> Tensor:
    """Return the sum over ``group``."""
    return sum_over(x.contiguous().clone(), group)


def join(part: Tensor, group: Any, dim: int) -> Tensor:
    """Join all ranks' parts along ``dim``, in rank order."""
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim)


def part_of_total(x: Tensor, group: Any, dim: int) -> Tensor:
    """Return this rank's part of the sum over ``group``."""
    return own_part(total(x, group, dim), group, dim).contiguous()


def sum_over(tensor: Tensor, group: Any) -> Tensor:
    """The sum over ``group``, in place."""
    dist.all_reduce(tensor, group=group)
    return tensor


def own_part(whole: Tensor, group: Any, dim: int) -> Tensor:
    """Return this rank's equal part along ``dim``."""
    return whole.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]


def paired(forth: Collective, back: Collective, x: Tensor, group: Any, dim: int = 1) -> Tensor:
    """Apply ``forth`` to ``x``, with ``back`` for its backward."""
    return Paired.apply(x, forth, back, group, dim)  # type: ignore[no-untyped-call,no-any-return]  # in torch


copy_in = partial(paired, same, total)  # f: computation with partial weights begins
sum_out = partial(paired, total, same)  # g: it ends
gather = partial(paired, join, part_of_total)  # f, between parts of sequences
scatter = partial(paired, part_of_total, join)  # g, between them


def sum_gradients(
    stage: nn.Module, mesh: DeviceMesh, *, unless: Callable[[str, nn.Parameter], bool] = lambda name, parameter: False
) -> None:
    """Sum gradients over the ranks of ``mesh`` in place, ``unless`` each rank has its own parameter."""
    for name, parameter in stage.named_parameters():
        if not unless(name, parameter):
            reduce_gradient(name, parameter, mesh.get_group())


def reduce_gradient(name: str, parameter: nn.Parameter, group: Any) -> None:
    """Sum the gradient of parameter ``name`` over ``group`` in place; of a DTensor, the local part."""
    if parameter.grad is not None:
        dist.all_reduce(local(parameter.grad), group=group)


def local(gradient: Any) -> Any:
    """Return the local part of ``gradient``."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
