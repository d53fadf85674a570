"""Primitives on the axes of a mesh, as one step: what a rank of it does."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeproof.cases.primitives.context import CONTEXT_PARALLEL
from pipeproof.cases.primitives.data_parallel import DDP, DDP_EVERY, DDP_UNUSED
from pipeproof.cases.primitives.experts import EXPERT_PARALLEL
from pipeproof.cases.primitives.layers import Layers, Microbatch, decoder, loss_fn
from pipeproof.cases.primitives.part import Part
from pipeproof.cases.primitives.sequence_parallel import SEQUENCE_PARALLEL
from pipeproof.cases.primitives.sharded import ZERO_2, ZERO_3, ZERO_3_EVERY
from pipeproof.cases.primitives.tensor_parallel import TENSOR_PARALLEL
from pipeproof.foreign.handed_back import HandedBack
from pipeproof.observers.watching import watch
from pipeproof.pipeline.step import PipelineSchedule

Axes = tuple[str, ...]
PARTS: Mapping[str, tuple[Axes, Part]] = MappingProxyType(
    {
        "tp": (("tp",), TENSOR_PARALLEL),
        "sp": (("sp",), SEQUENCE_PARALLEL),
        "ep": (("ep",), EXPERT_PARALLEL),
        "cp": (("cp",), CONTEXT_PARALLEL),
        "ddp": (("dp",), DDP),
        "ddp-every": (("dp",), DDP_EVERY),
        "ddp-unused": (("dp",), DDP_UNUSED),
        "zero-2": (("fsdp",), ZERO_2),
        "zero-3": (("fsdp",), ZERO_3),
        "zero-3-every": (("fsdp",), ZERO_3_EVERY),
        "hsdp": (("dp_replicate", "dp_shard"), ZERO_3),
    }
)


@dataclass(frozen=True)
class Stack:
    """``sizes`` of the mesh by its axes, ranks in rows; ``parts``: the primitives on them, in the order of applying."""

    sizes: Mapping[str, int]
    parts: tuple[str, ...]
    schedule: str = "1F1B"

    @property
    def reference(self) -> Callable[[], nn.Module]:
        """The model on one device."""
        return partial(decoder, 2 * max(2, self.sizes.get("pp", 1)), experts="ep" in self.sizes)

    @property
    def step(self) -> Callable[[Any, list[Microbatch]], HandedBack]:
        """What every rank does."""
        return partial(run, stack=self)


def run(model: Layers, microbatches: Sequence[Microbatch], *, stack: Stack) -> HandedBack:
    """One step of this rank: its stage, its share of the microbatches, all gradients reduced."""
    mesh = init_device_mesh("cpu", tuple(stack.sizes.values()), mesh_dim_names=tuple(stack.sizes))
    parts = [(part, mesh[axes]) for axes, part in map(PARTS.__getitem__, stack.parts)]
    stage = watch(stage_of(model, mesh))
    module: nn.Module = stage
    for part, own in parts:
        module = part.apply(module, own)
        microbatches = [part.share(one, own) for one in microbatches]
    divisor = len(microbatches) * math.prod(own.size() for part, own in parts if part.summed)
    with ExitStack() as around:
        for part, _ in parts:
            around.enter_context(part.around())
        if "pp" in stack.sizes:
            losses = piped(module, microbatches, divisor, mesh, stack.schedule)
        else:
            losses = accumulated(module, microbatches, divisor, parts)
    for part, own in parts:
        part.finish(stage, own)
    return HandedBack(stage, losses=whole(losses, parts) if holds_loss(mesh) else None)


def stage_of(model: Layers, mesh: DeviceMesh) -> Layers:
    """This rank's layers."""
    if "pp" not in (mesh.mesh_dim_names or ()):
        return model
    each, number = len(model) // mesh["pp"].size(), mesh.get_local_rank("pp")
    return model[number * each : (number + 1) * each]  # type: ignore[return-value]  # a slice is of the same class


def holds_loss(mesh: DeviceMesh) -> bool:
    """Whether this rank has the last stage."""
    names = mesh.mesh_dim_names or ()
    return "pp" not in names or mesh.get_local_rank("pp") == mesh["pp"].size() - 1


Parts = Sequence[tuple[Part, DeviceMesh]]


def accumulated(module: nn.Module, microbatches: Sequence[Microbatch], divisor: float, parts: Parts) -> list[float]:
    """Forward and backward of every microbatch, and their losses."""
    losses = []
    for number, (x, target) in enumerate(microbatches, start=1):
        with ExitStack() as synced:
            for part, _ in parts:
                synced.enter_context(part.sync(module, number == len(microbatches)))
            loss = loss_fn(module(x), target)
            (loss / divisor).backward()  # type: ignore[no-untyped-call]  # in torch
        losses.append(loss.item())
    return losses


def piped(
    module: nn.Module, microbatches: Sequence[Microbatch], divisor: float, mesh: DeviceMesh, kind: str
) -> list[float]:
    """The same in a pipeline along the axis pp."""
    runtime = PipelineSchedule(
        kind=kind,
        n_microbatches=len(microbatches),
        stages=[module],
        loss_fn=loss_fn,
        pp_group=mesh.get_group("pp"),
    )
    return list(runtime.train_step(microbatches, loss_divisor=divisor).losses)


def whole(losses: Sequence[float], parts: Parts) -> list[float]:
    """Losses of whole sequences, of those of their parts."""
    found = torch.tensor(losses)
    for part, own in parts:
        if part.in_parts:
            dist.all_reduce(found, group=own.get_group())
            found /= own.size()
    return found.tolist()
