"""Data parallelism of each kind alone, and each kind of parallelism stacked on a pipeline of two stages."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from primitives import SEQUENCE, Gather, Mixture, loss_fn, part_of, spread
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pipeproof import PipelineSchedule
from pipeproof.foreign import watch


def replicated(model: nn.Module, microbatches: list, *, unused: bool = False, every: bool = False) -> tuple:
    """DDP that reduces in the last backward, or in ``every`` one; ``unused``: it looks for unused parameters."""
    module = DistributedDataParallel(watch(model), find_unused_parameters=unused)
    losses = []
    for number, (x, target) in enumerate(microbatches):
        last = number == len(microbatches) - 1
        with nullcontext() if last or every else module.no_sync():
            losses.append(loss_fn(module(x), target))
            (losses[-1] / len(microbatches)).backward()
    return model, losses


def sharded(model: Any, microbatches: list, *, reshard: bool = True, every: bool = False, copies: int = 1) -> tuple:
    """``fully_shard``: ZeRO-3, or ZeRO-2 without ``reshard``; with ``copies`` HSDP."""
    shape = (copies, dist.get_world_size() // copies)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh if copies > 1 else mesh["dp_shard"], reshard_after_forward=reshard)
    losses = []
    for number, (x, target) in enumerate(microbatches):
        model.set_requires_gradient_sync(every or number == len(microbatches) - 1)
        losses.append(loss_fn(watch(model)(x), target))
        (losses[-1] / len(microbatches)).backward()
    return model, losses


def piped(stage: nn.Module, microbatches: list, mesh: DeviceMesh, *, ranks: int = 1) -> Any:
    """A step of our runtime; ``ranks`` share each microbatch's loss."""
    count, group = len(microbatches), mesh.get_group("pp")
    schedule = PipelineSchedule(kind="1F1B", n_microbatches=count, stages=[stage], loss_fn=loss_fn, pp_group=group)
    return schedule.train_step(microbatches, loss_divisor=ranks * count)


def meshed(other: str) -> tuple[DeviceMesh, Any, int]:
    """Two stages by two ranks along ``other``: the mesh, the group along that, and the stage."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", other))
    return mesh, mesh.get_group(other), mesh.get_local_rank("pp")


def with_shards(model: Any, microbatches: list) -> tuple:
    mesh, _, number = meshed("fsdp")
    stage = watch(model[2 * number : 2 * number + 2])
    for layer in (*stage, stage):
        fully_shard(layer, mesh=mesh["fsdp"])
    result = piped(stage, microbatches, mesh)
    return stage, result.losses, result.grad_norm


def with_experts(model: Any, microbatches: list) -> tuple:
    mesh, group, number = meshed("ep")
    stage = watch(model[2:] if number else model[:2])
    for layer in stage:
        if isinstance(layer, Mixture):
            spread(layer, group)
    result = piped(stage, microbatches, mesh, ranks=2)
    for name, parameter in stage.named_parameters():
        if "experts" not in name:
            dist.all_reduce(parameter.grad, group=group)
    return stage, result.losses


def with_parts_of_sequences(model: Any, microbatches: list) -> tuple:
    mesh, group, number = meshed("cp")
    stage = watch(model[number : number + 1])
    stage[0].gather = lambda x: Gather.apply(x, group, False)
    stage[0].first = dist.get_rank(group) * SEQUENCE // 2
    halves = [(part_of(x, group), part_of(target, group)) for x, target in microbatches]
    result = piped(stage, halves, mesh, ranks=2)
    losses = torch.tensor(result.losses) / 2
    dist.all_reduce(losses, group=group)
    for parameter in stage.parameters():
        dist.all_reduce(parameter.grad, group=group)
    return (stage, losses) if number else (stage,)
