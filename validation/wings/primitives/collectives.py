"""Differentiable collectives in pairs: the forward of one is the backward of the other.

They follow Megatron-LM (Shoeybi and others, 2019, figure 3; Korthikanti and others, 2022, figure 6).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Copy(torch.autograd.Function):
    """Identity; its backward sums gradients over ``group``: f."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        """Return the input."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Sum gradients, because all ranks used the input."""
        return sum_over(gradients[0].contiguous().clone(), ctx.group), None


class Reduce(torch.autograd.Function):
    """Sum over ``group``; every rank has the gradient: g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        """The sum."""
        return sum_over(x.contiguous().clone(), group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Return the gradient, equal for all addends."""
        return gradients[0], None


class Gather(torch.autograd.Function):
    """Join all parts in ``group`` along ``dim``, in rank order."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any, dim: int) -> Tensor:
        """The whole."""
        ctx.group, ctx.dim = group, dim
        return concatenate(part, group, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Sum gradients, because all ranks used the part."""
        return own_part(sum_over(gradients[0].contiguous().clone(), ctx.group), ctx.group, ctx.dim), None, None


class Scatter(torch.autograd.Function):
    """Sum over ``group``, and keep this rank's part along ``dim``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, dim: int) -> Tensor:
        """The part."""
        ctx.group, ctx.dim = group, dim
        return own_part(sum_over(x.contiguous().clone(), group), group, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Gather gradients: each rank has its part's, and contributed to all."""
        return concatenate(gradients[0], ctx.group, ctx.dim), None, None


def sum_over(tensor: Tensor, group: Any) -> Tensor:
    """The sum over ``group``, in place."""
    dist.all_reduce(tensor, group=group)
    return tensor


def own_part(whole: Tensor, group: Any, dim: int) -> Tensor:
    """Return this rank's equal part along ``dim``."""
    return whole.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]


def concatenate(part: Tensor, group: Any, dim: int) -> Tensor:
    """Gather all ranks' parts along ``dim``."""
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim)


def copy_in(x: Tensor, group: Any) -> Tensor:
    """Return ``x``, present on every rank: computation with partial weights begins."""
    return Copy.apply(x, group)  # type: ignore[no-untyped-call,no-any-return]  # in torch


def sum_out(x: Tensor, group: Any) -> Tensor:
    """Sum the results of partial weights over ranks."""
    return Reduce.apply(x, group)  # type: ignore[no-untyped-call,no-any-return]  # in torch


def gather(part: Tensor, group: Any, dim: int = 1) -> Tensor:
    """Gather every rank's part."""
    return Gather.apply(part, group, dim)  # type: ignore[no-untyped-call,no-any-return]  # in torch


def scatter(x: Tensor, group: Any, dim: int = 1) -> Tensor:
    """Sum the results of partial weights over ranks; return this rank's part."""
    return Scatter.apply(x, group, dim)  # type: ignore[no-untyped-call,no-any-return]  # in torch


def reduce_gradient(name: str, parameter: nn.Parameter, group: Any) -> None:
    """Sum the gradient of parameter ``name`` over ``group`` in place; of a DTensor, the local part."""
    if parameter.grad is not None:
        dist.all_reduce(local(parameter.grad), group=group)


def local(gradient: Any) -> Any:
    """Return the local part of ``gradient``."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
