"""Faults of parallelism around and inside a stage, and variants that are right, by name; and a step that has one.

Those of experts and of parts of sequences are here.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest.mock import patch

import axis_shards
import torch
import torch.distributed as dist
from axis_planting import (
    NORMS,
    SOUND_NORMS,
    Change,
    Chosen,
    Plant,
    Times,
    every,
    finished,
    gradients,
    having,
    in_part,
    on,
    summed,
    times,
    unless,
    wrapped,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pipeproof.wings.primitives import collectives, context, experts, layers, stacked
from pipeproof.wings.primitives.stacked import run
from pipeproof.wings.primitives.stacks import Stack


def last_experts_first(right: Any, experts_: Any, arrived: Tensor, counts: list[int]) -> Tensor:
    return right(experts_, arrived, counts).flip(0)


def half_the_capacity(right: Any, expert: Tensor) -> Tensor:
    with patch.object(layers, "CAPACITY", layers.CAPACITY / 2):
        return right(expert)


def without_gradient_back(right: Any, experts_: Any, group: Any, tokens: Tensor, expert: Tensor) -> Tensor:
    """What is sent to experts takes no gradient back to the tokens."""
    return right(experts_, group, tokens.detach().requires_grad_(), expert)


def positions_of_rank_0(right: Any, stage: nn.Module, mesh: DeviceMesh) -> nn.Module:
    module: nn.Module = right(stage, mesh)
    for one in module.modules():
        if isinstance(one, layers.Embedding):
            one.at = torch.arange(layers.SEQUENCE // mesh.size())
    return module


def mask_of_neighbour(right: Any, group: Any, at: Tensor, *given: Tensor) -> Tensor:
    shift = len(at) * (1 if dist.get_rank(group) == 0 else -1)
    keys = torch.arange(layers.SEQUENCE)
    with patch.object(context, "visible", lambda own, _: keys <= (at + shift)[:, None]):
        return right(group, at, *given)


def keys_in_reverse(right: Any, part: Tensor, group: Any, dim: int) -> Tensor:
    """The parts of keys and values are put together last first, and the mask is as if they were not."""
    return all_in_reverse(right, part, group, dim) if dim == 2 else right(part, group, dim)


def targets_of_neighbour(right: Any, microbatch: Any, mesh: DeviceMesh) -> Any:
    tokens, _ = right(microbatch, mesh)
    other = (mesh.get_local_rank() + 1) % mesh.size()
    return tokens, microbatch[1].chunk(mesh.size(), 1)[other]


def in_one_buffer(chosen: Chosen) -> Change:
    """``chosen`` gradients are summed as one, the last rank's first."""

    def finish(right: Any, stage: nn.Module, mesh: DeviceMesh) -> None:
        some = list(gradients(stage, chosen))
        flat = torch.cat([one.flatten() for one in some])
        parts = [torch.empty_like(flat) for _ in range(mesh.size())]
        dist.all_gather(parts, flat, group=mesh.get_group())
        whole = sum(parts[::-1], torch.zeros_like(flat))
        for one, part in zip(some, whole.split([one.numel() for one in some]), strict=True):
            one.copy_(part.view_as(one))

    return finish


def all_in_reverse(right: Any, part: Tensor, group: Any, dim: int) -> Tensor:
    """Parts are put together last first, with their positions."""
    return torch.cat(right(part, group, dim).chunk(dist.get_world_size(group), dim)[::-1], dim)


OF_EXPERTS: Mapping[str, Plant] = {
    "experts times ranks": finished("ep", times(0, experts.is_expert)),
    "experts averaged": finished("ep", times(-1, experts.is_expert)),
    "experts reduced as replicas": finished("ep", summed(experts.is_expert)),
    "router not reduced": in_part("ep", finish=unless(having("router"))),
    "norms not reduced": in_part("ep", finish=unless(having("norm"))),
    "shared expert not reduced": in_part("ep", finish=unless(having("shared"))),
    "sent back in another order": wrapped(experts, "in_order", lambda right, rows, order: rows[order]),
    "last experts first": wrapped(experts, "compute", last_experts_first),
    "half the capacity": wrapped(layers, "fits_capacity", half_the_capacity),
    "no gradient from experts": wrapped(experts, "visit_experts", without_gradient_back),
    "auxiliary gradient times ranks": wrapped(layers, "balance", lambda right, *given: Times.apply(right(*given), 2.0)),
    "auxiliary loss times ranks": wrapped(layers, "balance", lambda right, *given: right(*given) * 2.0),
    "parts not reduced": in_part("cp", finish=unless(every)),
    "positions not reduced": in_part("cp", finish=unless(having("positions"))),
    "mean over parts": finished("cp", times(-1)),
    "parts reduced twice": finished("cp", summed()),
    "keys' gradients not reduced": wrapped(collectives, "sum_over", lambda right, gradient, group: gradient),
    "positions of rank 0": in_part("cp", apply=positions_of_rank_0),
    "mask of the neighbour": wrapped(context, "attend_to_all", mask_of_neighbour),
    "keys in reverse": wrapped(context, "gather", keys_in_reverse),
    "targets of the neighbour": in_part("cp", share=targets_of_neighbour),
    "losses of its own part": wrapped(stacked, "whole", lambda right, losses, parts: list(losses)),
    "first stage's parts not reduced": in_part("cp", finish=unless(on(every, 0, 1))),
}

OF_EXPERTS_SOUND: Mapping[str, Plant] = {
    "experts: one buffer, in reverse": in_part("ep", finish=in_one_buffer(lambda name: not experts.is_expert(name))),
    "parts: one buffer, in reverse": in_part("cp", finish=in_one_buffer(every)),
    "zig-zag parts": wrapped(context, "places", lambda right, mesh, zigzag: right(mesh, zigzag=True)),
    "keys in reverse, with their positions": wrapped(context, "gather", all_in_reverse),
}

SOUND: Mapping[str, Plant] = {**axis_shards.SOUND, **OF_EXPERTS_SOUND, **SOUND_NORMS}
PLANTS: Mapping[str, Plant] = {
    "": nullcontext,
    **SOUND,
    **axis_shards.FAULTS,
    **OF_EXPERTS,
    **NORMS,
}


def step(model: Any, microbatches: Sequence[Any], *, stack: Stack, fault: str, watched: bool) -> Any:
    """One step of ``stack`` with ``fault``; empty: a right one."""
    with ExitStack() as planted:
        if not watched:
            planted.enter_context(patch.object(stacked, "watch", lambda module: module))
        planted.enter_context(PLANTS[fault]())
        return run(model, microbatches, stack=stack)
