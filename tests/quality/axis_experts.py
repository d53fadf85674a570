"""Experts and parts of sequences: faults, and what is as right."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from axis_planting import Change, Plant, Times, finished, gradients, having, in_part, on, summed, times, unless, wrapped
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pipeproof.wings.primitives import collectives, context, experts, layers, stacked


def in_each_order(right: Any) -> Any:
    return lambda rows, order: rows[order]


def last_experts_first(right: Any) -> Any:
    def computed(experts_: Any, arrived: Tensor, counts: list[int]) -> Tensor:
        return right(experts_, arrived, counts).flip(0)

    return computed


def half_the_capacity(right: Any) -> Any:
    def within(expert: Tensor) -> Tensor:
        with patch.object(layers, "CAPACITY", layers.CAPACITY / 2):
            return right(expert)

    return within


def without_gradient_back(right: Any) -> Any:
    """What is sent to experts takes no gradient back to the tokens."""

    def visited(experts_: Any, group: Any, tokens: Tensor, expert: Tensor) -> Tensor:
        return right(experts_, group, tokens.detach().requires_grad_(), expert)

    return visited


def auxiliary(factor: float, *, gradient_alone: bool) -> Change:
    def change(right: Any) -> Any:
        def balance(*given: Any) -> Tensor:
            made: Tensor = right(*given)
            return Times.apply(made, factor) if gradient_alone else made * factor

        return balance

    return change


def alone(right: Any) -> Any:
    return lambda gradient, group: gradient


def positions_of_rank_0(right: Any) -> Any:
    def split(stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
        module: nn.Module = right(stage, mesh)
        for one in module.modules():
            if isinstance(one, layers.Embedding):
                one.at = torch.arange(layers.SEQUENCE // mesh.size())
        return module

    return split


def mask_of_neighbour(right: Any) -> Any:
    def attended(group: Any, at: Tensor, *given: Tensor) -> Tensor:
        shift = len(at) * (1 if dist.get_rank(group) == 0 else -1)
        every = torch.arange(layers.SEQUENCE)
        with patch.object(context, "visible", lambda own, keys: every <= (at + shift)[:, None]):
            return right(group, at, *given)

    return attended


def keys_in_reverse(right: Any) -> Any:
    """The parts of keys and values are put together last first, and the mask is as if they were not."""

    def gathered(part: Tensor, group: Any, dim: int) -> Tensor:
        whole: Tensor = right(part, group, dim)
        return torch.cat(whole.chunk(dist.get_world_size(group), dim)[::-1], dim) if dim == 2 else whole

    return gathered


def targets_of_neighbour(right: Any) -> Any:
    def share(microbatch: Any, mesh: DeviceMesh) -> Any:
        tokens, _ = right(microbatch, mesh)
        other = (mesh.get_local_rank() + 1) % mesh.size()
        return tokens, microbatch[1].chunk(mesh.size(), 1)[other]

    return share


def own_losses(right: Any) -> Any:
    return lambda losses, parts: list(losses)


def in_one_buffer(chosen: Callable[[str], bool]) -> Change:
    """``chosen`` gradients are summed as one, the last rank's first."""

    def change(right: Any) -> Any:
        def finish(stage: nn.Module, mesh: DeviceMesh) -> None:
            some = list(gradients(stage, chosen))
            flat = torch.cat([one.flatten() for one in some])
            parts = [torch.empty_like(flat) for _ in range(mesh.size())]
            dist.all_gather(parts, flat, group=mesh.get_group())
            whole = sum(parts[::-1], torch.zeros_like(flat))
            for one, part in zip(some, whole.split([one.numel() for one in some]), strict=True):
                one.copy_(part.view_as(one))

        return finish

    return change


def zigzag(right: Any) -> Any:
    """Each rank has one part of the beginning and one of the end."""
    return lambda mesh, zigzag: right(mesh, zigzag=True)


def all_in_reverse(right: Any) -> Any:
    """Parts are put together last first, with their positions."""

    def gathered(part: Tensor, group: Any, dim: int) -> Tensor:
        return torch.cat(right(part, group, dim).chunk(dist.get_world_size(group), dim)[::-1], dim)

    return gathered


FAULTS: Mapping[str, Sequence[Plant]] = {
    "experts times ranks": (finished("ep", times(0, experts.is_expert)),),
    "experts averaged": (finished("ep", times(-1, experts.is_expert)),),
    "experts reduced as replicas": (finished("ep", summed(experts.is_expert)),),
    "router not reduced": (in_part("ep", finish=unless(having("router"))),),
    "norms not reduced": (in_part("ep", finish=unless(having("norm"))),),
    "shared expert not reduced": (in_part("ep", finish=unless(having("shared"))),),
    "sent back in another order": (wrapped(experts, "in_order", in_each_order),),
    "last experts first": (wrapped(experts, "compute", last_experts_first),),
    "half the capacity": (wrapped(layers, "fits_capacity", half_the_capacity),),
    "no gradient from experts": (wrapped(experts, "visit_experts", without_gradient_back),),
    "auxiliary gradient times ranks": (wrapped(layers, "balance", auxiliary(2.0, gradient_alone=True)),),
    "auxiliary loss times ranks": (wrapped(layers, "balance", auxiliary(2.0, gradient_alone=False)),),
    "parts not reduced": (in_part("cp", finish=unless(lambda name: True)),),
    "positions not reduced": (in_part("cp", finish=unless(having("positions"))),),
    "mean over parts": (finished("cp", times(-1)),),
    "parts reduced twice": (finished("cp", summed()),),
    "keys' gradients not reduced": (wrapped(collectives, "sum_over", alone),),
    "positions of rank 0": (in_part("cp", apply=positions_of_rank_0),),
    "mask of the neighbour": (wrapped(context, "attend_to_all", mask_of_neighbour),),
    "keys in reverse": (wrapped(context, "gather", keys_in_reverse),),
    "targets of the neighbour": (in_part("cp", share=targets_of_neighbour),),
    "losses of its own part": (wrapped(stacked, "whole", own_losses),),
    "first stage's parts not reduced": (in_part("cp", finish=unless(on(having(""), 0, 1))),),
}

SOUND: Mapping[str, Sequence[Plant]] = {
    "experts: one buffer, in reverse": (in_part("ep", finish=in_one_buffer(lambda name: not experts.is_expert(name))),),
    "parts: one buffer, in reverse": (in_part("cp", finish=in_one_buffer(lambda name: True)),),
    "zig-zag parts": (wrapped(context, "places", zigzag),),
    "keys in reverse, with their positions": (wrapped(context, "gather", all_in_reverse),),
}
