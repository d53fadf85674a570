"""What a rank does in a step of a stack; and the verdict on it."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipeproof.cases.primitives.context import CONTEXT_PARALLEL
from pipeproof.cases.primitives.data_parallel import DDP, DDP_EVERY, DDP_UNUSED, ZERO_1, adam
from pipeproof.cases.primitives.experts import EXPERT_PARALLEL
from pipeproof.cases.primitives.layers import Layers, Microbatch, decoder, loss_fn, microbatches
from pipeproof.cases.primitives.norm import norm_of
from pipeproof.cases.primitives.part import Part
from pipeproof.cases.primitives.primitive import primitive_of
from pipeproof.cases.primitives.sequence_parallel import SEQUENCE_PARALLEL
from pipeproof.cases.primitives.sharded import ZERO_2, ZERO_3, ZERO_3_EVERY
from pipeproof.cases.primitives.stacks import PIPELINE, Stack
from pipeproof.cases.primitives.tensor_parallel import TENSOR_PARALLEL
from pipeproof.foreign import HandedBack, WhiteBox
from pipeproof.judging.verdict import Verdict
from pipeproof.observers.watching import watch
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.schedules import build
from pipeproof.pipeline.step import PipelineSchedule

PARTS: Mapping[str, Part] = MappingProxyType(
    {
        "tp": TENSOR_PARALLEL,
        "sp": SEQUENCE_PARALLEL,
        "ep": EXPERT_PARALLEL,
        "cp": CONTEXT_PARALLEL,
        "ddp": DDP,
        "zero-1": ZERO_1,
        "ddp-every": DDP_EVERY,
        "ddp-unused": DDP_UNUSED,
        "zero-2": ZERO_2,
        "zero-3": ZERO_3,
        "zero-3-every": ZERO_3_EVERY,
        "hsdp": ZERO_3,
    }
)
Parts = Sequence[tuple[Part, DeviceMesh]]
Step = Callable[[Any, list[Microbatch]], HandedBack]


def validated(
    stack: Stack, whitebox: WhiteBox, *, step: Step | None = None, reference: Callable[[], nn.Module] | None = None
) -> Verdict:
    """The verdict on a step of ``stack``, or on another ``step``, beside the decoder on one device."""
    verdict = whitebox.validate(
        step or step_of(stack),
        reference=reference or reference_of(stack),
        microbatches=microbatches(stack.microbatches, stack.seed),
        ranks=stack.sizes or 1,
        loss_fn=loss_fn,
        optimizer=adam if any(PARTS[name].updates for name in stack.parts) else None,
    )
    return verdict if step else replace(verdict, config=f"stack {stack}, {verdict.config}", rerun=stack.replay)


def reference_of(stack: Stack) -> Callable[[], nn.Module]:
    """Builds the model on one device."""
    return partial(decoder, stack.layers, experts=stack.has_experts, seed=stack.seed)


def step_of(stack: Stack) -> Step:
    """What every rank does."""
    return partial(run, stack=stack)


def run(model: Layers, microbatches: Sequence[Microbatch], *, stack: Stack) -> HandedBack:
    """One step of this rank: its stages, its share of the microbatches, all gradients reduced."""
    mesh = init_device_mesh(device_of(model), tuple(stack.sizes.values()), mesh_dim_names=tuple(stack.sizes))
    parts = [(PARTS[name], mesh[primitive_of(name).axes]) for name in stack.parts]
    stages = [watch(one) for one in stages_of(model, mesh, stack)]
    modules: list[nn.Module] = list(stages)
    for part, own in parts:
        modules = [part.apply(module, own) for module in modules]
        microbatches = [part.share(one, own) for one in microbatches]
    divisor = len(microbatches) * math.prod(own.size() for part, own in parts if part.summed)
    with ExitStack() as around:
        for part, _ in parts:
            around.enter_context(part.around())
        if PIPELINE in stack.sizes:
            losses = piped(modules, microbatches, divisor, mesh, stack.schedule)
        else:
            losses = accumulated(modules[0], microbatches, divisor, parts)
    for part, own in parts:
        for stage in stages:
            part.finish(stage, own)
    norm = norm_of(stages, mesh)
    for part, own in parts:
        for stage in stages:
            part.update(stage, own)
    told = whole(losses, parts) if holds_loss(mesh, stack) else None
    return HandedBack(stages, losses=told, grad_norm=norm)


def device_of(model: nn.Module) -> str:
    """The kind of device that it is on."""
    return next(model.parameters()).device.type


def stages_of(model: Layers, mesh: DeviceMesh, stack: Stack) -> list[Layers]:
    """This rank's layers, stage by stage."""
    if PIPELINE not in stack.sizes:
        return [model]
    numbers = placed(stack).stages_of(mesh.get_local_rank(PIPELINE))
    each = len(model) // (stack.sizes[PIPELINE] * stack.virtual)
    return [model[number * each : (number + 1) * each] for number in numbers]  # type: ignore[misc]  # of one class


def placed(stack: Stack) -> Schedule:
    """Which says where stages are."""
    return build(stack.schedule, ranks=stack.sizes[PIPELINE], microbatches=stack.each, virtual=stack.virtual)


def holds_loss(mesh: DeviceMesh, stack: Stack) -> bool:
    """Whether this rank has the last stage."""
    return PIPELINE not in stack.sizes or mesh.get_local_rank(PIPELINE) == placed(stack).placement[-1]


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
    modules: Sequence[nn.Module], microbatches: Sequence[Microbatch], divisor: float, mesh: DeviceMesh, kind: str
) -> list[float]:
    """The same in a pipeline, of this rank's stages."""
    runtime = PipelineSchedule(
        kind=kind,
        n_microbatches=len(microbatches),
        stages=modules,
        loss_fn=loss_fn,
        pp_group=mesh.get_group(PIPELINE),
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
