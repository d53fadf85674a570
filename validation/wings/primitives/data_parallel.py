"""Data parallelism: torch's ``DistributedDataParallel``, and shards by its ``fully_shard``."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pipeproof.wings.primitives.collectives import local, sum_gradients
from pipeproof.wings.primitives.part import RankPart


def replicate(stage: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """Wrap ``stage`` in DDP, unless it has DTensors, which DDP cannot reduce: ``average`` does."""
    if has_dtensors(stage):
        return stage
    return DistributedDataParallel(stage, process_group=mesh.get_group(), **options)


def shard_layers(stage: Any, mesh: DeviceMesh, *, reshard: bool = True) -> nn.Module:
    """Every layer of ``stage`` in shards; with a mesh of two axes, in copies along the first. In place."""
    for layer in (*stage, stage):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    return stage  # type: ignore[no-any-return]


def in_last(module: nn.Module, last: bool) -> AbstractContextManager[object]:
    """Reduce gradients in the last backward alone."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
    return module.no_sync() if isinstance(module, DistributedDataParallel) and not last else nullcontext()


def average(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Average DTensors' gradients over replicas."""
    if has_dtensors(stage):
        sum_gradients(stage, mesh)
        for parameter in stage.parameters():
            local(parameter.grad).div_(mesh.size())


def has_dtensors(stage: nn.Module) -> bool:
    """True if a parameter is a DTensor."""
    return any(isinstance(parameter, DTensor) for parameter in stage.parameters())


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer for stages, and for the model on one device."""
    return torch.optim.Adam(model.parameters(), **ADAM)


def update_in_shares(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Update this rank's share of parameters, with its own moments, then broadcast it."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch's own deprecations

    group = mesh.get_group()
    ZeroRedundancyOptimizer(stage.parameters(), optimizer_class=torch.optim.Adam, process_group=group, **ADAM).step()


ADAM: Mapping[str, Any] = MappingProxyType({"lr": 1e-2})
PARTS = {
    "ddp": RankPart(replicate, sync=in_last, finish=average),
    "zero-1": RankPart(replicate, sync=in_last, finish=average, update=update_in_shares),
    "ddp-every": RankPart(replicate, finish=average),
    # In every backward: where the first is in no_sync, static_graph fails an assertion of torch's own (2.13).
    "ddp-static": RankPart(partial(replicate, static_graph=True), finish=average),
    "ddp-unused": RankPart(partial(replicate, find_unused_parameters=True), sync=in_last, finish=average),
    "zero-2": RankPart(partial(shard_layers, reshard=False), sync=in_last),
    "zero-3": RankPart(shard_layers, sync=in_last),
    "zero-3-every": RankPart(shard_layers),
    "hsdp": RankPart(shard_layers, sync=in_last),
}
