"""Context parallelism by hand: each rank has a part of every sequence, and gathers keys and values of all."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pipeproof.cases.primitives.layers import Attention, Embedding, Microbatch, attended
from pipeproof.cases.primitives.part import Part
from pipeproof.cases.primitives.reduction import reduced
from pipeproof.cases.primitives.sizes import SEQUENCE


class Gather(torch.autograd.Function):
    """The parts of all ranks of ``group`` along ``dim``, in the order of the ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: Any, dim: int) -> Tensor:
        """The whole."""
        ctx.group, ctx.dim = group, dim
        parts = [
            torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))
        ]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        """All ranks used the part: the sum of what they give for it."""
        whole = summed_over(gradients[0].contiguous(), ctx.group)
        return whole.chunk(dist.get_world_size(ctx.group), ctx.dim)[dist.get_rank(ctx.group)], None, None


def summed_over(gradient: Tensor, group: Any) -> Tensor:
    """The sum over ``group``."""
    dist.all_reduce(gradient, group=group)
    return gradient


def gathered(part: Tensor, group: Any, dim: int) -> Tensor:
    """The whole of every rank's part."""
    return Gather.apply(part, group, dim)  # type: ignore[no-untyped-call,no-any-return]  # in torch


def places(mesh: DeviceMesh) -> Tensor:
    """The positions in a sequence of this rank's part."""
    return torch.arange(SEQUENCE).chunk(mesh.size())[mesh.get_local_rank()]


def part_of(microbatch: Microbatch, mesh: DeviceMesh) -> Microbatch:
    """This rank's part of every sequence."""
    tokens, target = (one[:, places(mesh)] for one in microbatch)
    return tokens, target


def split(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Let attention see all of every sequence, and positions be those of this rank's part. In place."""
    at = places(mesh)
    for module in stage.modules():
        if isinstance(module, Embedding):
            module.at = at
        if isinstance(module, Attention):
            module.attend = partial(attended_to_all, mesh.get_group(), at)
    return stage


def attended_to_all(group: Any, at: Tensor, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Causal attention of the queries at positions ``at`` to the keys of all ranks."""
    every = gathered(at[None], group, 1)[0]
    return attended(queries, gathered(keys, group, 2), gathered(values, group, 2), visible(at, every))


def visible(at: Tensor, every: Tensor) -> Tensor:
    """Which keys at positions ``every`` the queries at positions ``at`` may see."""
    return every <= at[:, None]


def summed(stage: nn.Module, mesh: DeviceMesh) -> None:
    """The gradients of all parameters: each rank has those of its part of the sequences."""
    for name, parameter in stage.named_parameters():
        reduced(name, parameter, mesh.get_group())


CONTEXT_PARALLEL = Part(split, share=part_of, finish=summed, summed=True, in_parts=True)
