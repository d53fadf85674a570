"""Collectives that gradients pass, in pairs: what one does in the forward, the other does in the backward.

They are those of Megatron-LM (Shoeybi and others, 2019, figure 3; Korthikanti and others, 2022, figure 6).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Copy(torch.autograd.Function):
    """Nothing; the gradients that all ranks of ``group`` have for it are summed: f."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        """What came in."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """All ranks used it: the sum of what they give for it."""
        return summed_over(gradients[0].contiguous().clone(), ctx.group), None


class Reduce(torch.autograd.Function):
    """The sum over ``group``, whose gradient every rank has: g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        """The sum."""
        return summed_over(x.contiguous().clone(), group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """It is the same for every addend."""
        return gradients[0], None


class Gather(torch.autograd.Function):
    """The parts of all ranks of ``group`` along ``dim``, in the order of the ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any, dim: int) -> Tensor:
        """The whole."""
        ctx.group, ctx.dim = group, dim
        return put_together(part, group, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """All ranks used the part: the sum of what they give for it."""
        return own_part(summed_over(gradients[0].contiguous().clone(), ctx.group), ctx.group, ctx.dim), None, None


class Scatter(torch.autograd.Function):
    """Of the sum over ``group``, this rank's part along ``dim``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, dim: int) -> Tensor:
        """The part."""
        ctx.group, ctx.dim = group, dim
        return own_part(summed_over(x.contiguous().clone(), group), group, dim).contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """Each rank has the gradient of its part, and gave to those of all."""
        return put_together(gradients[0], ctx.group, ctx.dim), None, None


def summed_over(tensor: Tensor, group: Any) -> Tensor:
    """The sum over ``group``, in place."""
    dist.all_reduce(tensor, group=group)
    return tensor


def own_part(whole: Tensor, group: Any, dim: int) -> Tensor:
    """This rank's of equal parts along ``dim``."""
    return whole.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]


def put_together(part: Tensor, group: Any, dim: int) -> Tensor:
    """The parts of all ranks along ``dim``."""
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, part.contiguous(), group=group)
    return torch.cat(parts, dim)


def copied(x: Tensor, group: Any) -> Tensor:
    """``x``, which every rank has: here begins what they do with parts of the weights."""
    return Copy.apply(x, group)  # type: ignore[no-untyped-call,no-any-return]  # in torch


def summed(x: Tensor, group: Any) -> Tensor:
    """The sum of what ranks made with parts of the weights."""
    return Reduce.apply(x, group)  # type: ignore[no-untyped-call,no-any-return]  # in torch


def gathered(part: Tensor, group: Any, dim: int = 1) -> Tensor:
    """The whole of every rank's part."""
    return Gather.apply(part, group, dim)  # type: ignore[no-untyped-call,no-any-return]  # in torch


def scattered(x: Tensor, group: Any, dim: int = 1) -> Tensor:
    """This rank's part of the sum of what ranks made with parts of the weights."""
    return Scatter.apply(x, group, dim)  # type: ignore[no-untyped-call,no-any-return]  # in torch


def reduced(name: str, parameter: nn.Parameter, group: Any) -> None:
    """The gradient of the parameter ``name``, summed over ``group`` in place; of a DTensor what this rank has."""
    if parameter.grad is not None:
        dist.all_reduce(local(parameter.grad), group=group)


def local(gradient: Any) -> Any:
    """What this rank has of ``gradient``."""
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
