"""Data parallelism: torch's ``DistributedDataParallel``."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pipeproof.wings.primitives.collectives import local, reduced
from pipeproof.wings.primitives.part import RankPart


def replicated(stage: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """``stage`` in DDP; itself if it has DTensors, which DDP cannot reduce: ``averaged`` does."""
    if has_dtensors(stage):
        return stage
    return DistributedDataParallel(stage, process_group=mesh.get_group(), **options)


def in_last(module: nn.Module, last: bool) -> AbstractContextManager[object]:
    """Gradients are reduced in the last backward alone."""
    return module.no_sync() if isinstance(module, DistributedDataParallel) and not last else nullcontext()


def averaged(stage: nn.Module, mesh: DeviceMesh) -> None:
    """The mean of DTensors' gradients over the replicas."""
    if has_dtensors(stage):
        for name, parameter in stage.named_parameters():
            reduced(name, parameter, mesh.get_group())
            local(parameter.grad).div_(mesh.size())


def has_dtensors(stage: nn.Module) -> bool:
    """Whether any parameter is one."""
    return any(isinstance(parameter, DTensor) for parameter in stage.parameters())


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """What updates the parameters of a stage, and of the model on one device."""
    return torch.optim.Adam(model.parameters(), **ADAM)


def updated_in_shares(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Each rank updates its share of the parameters, of whose moments it alone knows, and hands them to the others."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of what torch itself has deprecated

    group = mesh.get_group()
    ZeroRedundancyOptimizer(stage.parameters(), optimizer_class=torch.optim.Adam, process_group=group, **ADAM).step()


ADAM: Mapping[str, Any] = MappingProxyType({"lr": 1e-2})
DDP = RankPart(replicated, sync=in_last, finish=averaged)
ZERO_1 = RankPart(replicated, sync=in_last, finish=averaged, update=updated_in_shares)
DDP_EVERY = RankPart(replicated, finish=averaged)
DDP_UNUSED = RankPart(partial(replicated, find_unused_parameters=True), sync=in_last, finish=averaged)
# In every backward: where the first is in no_sync, static_graph fails an assertion of torch's own (2.13).
DDP_STATIC = RankPart(partial(replicated, static_graph=True), finish=averaged)
