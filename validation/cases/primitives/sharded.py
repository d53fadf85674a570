"""Shards of parameters, gradients and the optimizer's state: torch's ``fully_shard``, alone and beside replicas."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from pipeproof.cases.primitives.part import Part


def sharded(stage: Any, mesh: DeviceMesh, *, reshard: bool = True) -> nn.Module:
    """Every layer of ``stage`` in shards; with a mesh of two axes, in copies along the first. In place."""
    for layer in (*stage, stage):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    return stage  # type: ignore[no-any-return]


def in_last(module: nn.Module, last: bool) -> AbstractContextManager[object]:
    """Gradients are reduced in the last backward alone."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
    return nullcontext()


ZERO_3 = Part(sharded, sync=in_last)
ZERO_3_EVERY = Part(sharded)
ZERO_2 = Part(partial(sharded, reshard=False), sync=in_last)
