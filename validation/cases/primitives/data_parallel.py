"""Data parallelism: torch's ``DistributedDataParallel``."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from pipeproof.cases.primitives.part import Part
from pipeproof.cases.primitives.reduction import local, reduced


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


DDP = Part(replicated, sync=in_last, finish=averaged)
DDP_EVERY = Part(replicated, finish=averaged)
DDP_UNUSED = Part(partial(replicated, find_unused_parameters=True), sync=in_last, finish=averaged)
