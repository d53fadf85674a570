"""A rank's work in a step of a stack; and the step's verdict."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from pipeproof import StepResult
from pipeproof.core.observe.watching import watch
from pipeproof.core.replicas import Replicas
from pipeproof.core.verdict import Verdict
from pipeproof.own.timed_step import Running, Setup
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.schedules import build
from pipeproof.pipeline.step import PipelineSchedule
from pipeproof.whitebox import WhiteBox
from pipeproof.wings.primitives.context import CONTEXT_PARALLEL, ZIGZAG
from pipeproof.wings.primitives.data_parallel import DDP, DDP_EVERY, DDP_STATIC, DDP_UNUSED, ZERO_1, adam
from pipeproof.wings.primitives.experts import EXPERT_PARALLEL
from pipeproof.wings.primitives.layers import Layers, Microbatch, decoder, loss_fn, microbatches
from pipeproof.wings.primitives.norm import norm_of
from pipeproof.wings.primitives.part import Index, RankPart
from pipeproof.wings.primitives.primitive import primitive_of
from pipeproof.wings.primitives.recompute import (
    RECOMPUTE,
    RECOMPUTE_ATTENTION,
    RECOMPUTE_ATTENTION_REENTRANT,
    RECOMPUTE_REENTRANT,
    RECOMPUTE_SELECTIVE,
)
from pipeproof.wings.primitives.ring import RING, RING_ZIGZAG
from pipeproof.wings.primitives.sequence_parallel import SEQUENCE_PARALLEL
from pipeproof.wings.primitives.stacks import PIPELINE, Stack
from pipeproof.wings.primitives.tensor_by_hand import SEQUENCE_BY_HAND, TENSOR_BY_HAND
from pipeproof.wings.primitives.tensor_parallel import TENSOR_PARALLEL
from pipeproof.worlds.worker import RankContext


def shard_layers(stage: Any, mesh: DeviceMesh, *, reshard: bool = True) -> nn.Module:
    """Every layer of ``stage`` in shards; with a mesh of two axes, in copies along the first. In place."""
    for layer in (*stage, stage):
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    return stage  # type: ignore[no-any-return]


def in_last(module: nn.Module, last: bool) -> AbstractContextManager[object]:
    """Reduce gradients in the last backward alone."""
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
    return nullcontext()


ZERO_3 = RankPart(shard_layers, sync=in_last)
ZERO_3_EVERY = RankPart(shard_layers)
ZERO_2 = RankPart(partial(shard_layers, reshard=False), sync=in_last)

PARTS: Mapping[str, RankPart] = MappingProxyType(
    {
        "recompute": RECOMPUTE,
        "recompute-reentrant": RECOMPUTE_REENTRANT,
        "recompute-selective": RECOMPUTE_SELECTIVE,
        "recompute-attention": RECOMPUTE_ATTENTION,
        "recompute-attention-reentrant": RECOMPUTE_ATTENTION_REENTRANT,
        "tp": TENSOR_PARALLEL,
        "sp": SEQUENCE_PARALLEL,
        "tp-by-hand": TENSOR_BY_HAND,
        "sp-by-hand": SEQUENCE_BY_HAND,
        "ep": EXPERT_PARALLEL,
        "cp": CONTEXT_PARALLEL,
        "cp-zigzag": ZIGZAG,
        "ring": RING,
        "ring-zigzag": RING_ZIGZAG,
        "ddp": DDP,
        "zero-1": ZERO_1,
        "ddp-every": DDP_EVERY,
        "ddp-static": DDP_STATIC,
        "ddp-unused": DDP_UNUSED,
        "zero-2": ZERO_2,
        "zero-3": ZERO_3,
        "zero-3-every": ZERO_3_EVERY,
        "hsdp": ZERO_3,
    }
)
Parts = Sequence[tuple[RankPart, DeviceMesh]]
Step = Callable[[Any, list[Microbatch]], StepResult]


def validate_stack(
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
    """Return the builder of the model on one device."""
    blocks = stack.blocks or "experts" * stack.has_experts
    return partial(decoder, stack.layers, blocks=blocks, dropout=stack.dropout, seed=stack.seed)


def step_of(stack: Stack) -> Step:
    """Return the step of every rank."""
    return partial(run, stack=stack)


def run(model: Layers, microbatches: Sequence[Microbatch], *, stack: Stack) -> StepResult:
    """Run one step on this rank: its stages, its share of microbatches, all gradients reduced."""
    return ready(model, microbatches, stack=stack).step()


@dataclass(frozen=True)
class RankPlace:
    """A rank's place: the mesh of its stack, and each part with its axes."""

    stack: Stack
    mesh: DeviceMesh
    parts: Parts

    @classmethod
    def of(cls, stack: Stack, model: nn.Module) -> Self:
        """Build this rank's parts."""
        mesh = mesh_of(stack, model)
        axes = {name: primitive_of(name).axes for name in stack.parts}
        return cls(stack, mesh, [(PARTS[name], mesh[own] if own else mesh) for name, own in axes.items()])

    def pipeline(self, modules: Sequence[nn.Module], microbatches: int) -> PipelineSchedule | None:
        """Build the pipeline of this rank's ``modules``, if several ranks have stages."""
        if not self.stack.has_pipeline:
            return None
        return PipelineSchedule(
            kind=self.stack.schedule,
            n_microbatches=microbatches,
            stages=modules,
            loss_fn=loss_of(self.parts),
            pp_group=self.mesh.get_group(PIPELINE),
        )


@dataclass(frozen=True)
class Ready:
    """A rank with stages and its share of microbatches, ready to step; cleared gradients allow another step."""

    place: RankPlace
    stages: Sequence[Layers]
    modules: Sequence[nn.Module]
    microbatches: Sequence[Microbatch]
    divisor: float
    pipeline: PipelineSchedule | None

    def step(self) -> StepResult:
        """Forward and backward of every microbatch, all gradients reduced."""
        parts = self.place.parts
        with ExitStack() as around:
            for part, _ in parts:
                around.enter_context(part.around())
            if self.pipeline is not None:
                losses = list(self.pipeline.train_step(self.microbatches, loss_divisor=self.divisor).losses)
            else:
                losses = accumulate(self.modules[0], self.microbatches, self.divisor, parts)
        return self._result(losses)

    def _result(self, losses: Sequence[float]) -> StepResult:
        """Return this rank's results after reducing gradients and updating parameters."""
        stack, mesh, parts = self.place.stack, self.place.mesh, self.place.parts
        each = [(part, stage, own) for part, own in parts for stage in self.stages]
        for part, stage, own in each:
            part.finish(stage, own)
        held = {one: at for part, stage, own in each for one, at in part.held(stage, own).items()}
        norm = norm_of(self.stages, mesh, in_parts=held)
        for part, stage, own in each:
            part.update(stage, own)
        reported = whole(losses, parts) if holds_loss(mesh, stack) else None
        return StepResult(self.stages, losses=reported, grad_norm=norm, gradients=gradients_of(self.stages, held))


def ready(model: Layers, microbatches: Sequence[Microbatch], *, stack: Stack) -> Ready:
    """Prepare this rank of ``stack`` for its first step."""
    place = RankPlace.of(stack, model)
    stages = [watch(one) for one in stages_of(model, place.mesh, stack)]
    modules: list[nn.Module] = list(stages)
    for part, own in place.parts:
        modules = [part.apply(module, own) for module in modules]
        microbatches = [part.share(one, own) for one in microbatches]
    divisor = divisor_of(len(microbatches), place.parts)
    return Ready(place, stages, modules, microbatches, divisor, place.pipeline(modules, len(microbatches)))


def setup(context: RankContext, stack: Stack) -> Setup:
    """Prepare this rank of ``stack`` for timing, with its replica's microbatches."""
    every = microbatches(stack.microbatches, stack.seed)
    own = Replicas.along(stack.sizes or 1, stack.microbatches).share(context.rank)
    given = [(x.to(context.device), y.to(context.device)) for x, y in (every[number] for number in own)]

    def build_rank() -> Running:
        model = reference_of(stack)().to(context.device).train()
        rank = ready(model, given, stack=stack)  # type: ignore[arg-type]  # of its layers
        return Running(model, rank.stages, lambda: rank.step().losses or ())

    return build_rank


def mesh_of(stack: Stack, model: nn.Module) -> DeviceMesh:
    """Return the mesh; one rank for a stack without axes."""
    sizes = stack.sizes or {"dp": 1}
    return init_device_mesh(device_of(model), tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def device_of(model: nn.Module) -> str:
    """Return the model's kind of device."""
    return next(model.parameters()).device.type


def stages_of(model: Layers, mesh: DeviceMesh, stack: Stack) -> list[Layers]:
    """Return this rank's layers, stage by stage."""
    if not stack.has_pipeline:
        return [model]
    numbers = placement_of(stack).stages_of(mesh.get_local_rank(PIPELINE))
    each = len(model) // (stack.sizes[PIPELINE] * stack.virtual)
    return [model[number * each : (number + 1) * each] for number in numbers]  # type: ignore[misc]  # of one class


def placement_of(stack: Stack) -> Schedule:
    """Return a schedule with the placement of stages."""
    return build(stack.schedule, ranks=stack.sizes[PIPELINE], microbatches=stack.each, virtual=stack.virtual)


def holds_loss(mesh: DeviceMesh, stack: Stack) -> bool:
    """True if this rank has the last stage."""
    return not stack.has_pipeline or mesh.get_local_rank(PIPELINE) == placement_of(stack).placement[-1]


def gradients_of(
    stages: Sequence[nn.Module], held: Mapping[nn.Parameter, Index]
) -> Mapping[nn.Parameter, object] | None:
    """Return all gradients of ``stages``, with the positions of partial ones; None if ``.grad`` suffices."""
    if not held:
        return None
    return {one: (one.grad, held[one]) if one in held else one.grad for stage in stages for one in stage.parameters()}


def divisor_of(count: float, parts: Parts) -> float:
    """Return the divisor of each loss: microbatches in a sum, or their average over replicas in a mean."""
    found = torch.tensor(count, dtype=torch.float64)
    for part, own in parts:
        for axis in range(own.ndim):
            dist.all_reduce(found, group=own.get_group(axis))
            found /= 1 if part.summed else own.size(axis)
    return found.item()


def loss_of(parts: Parts) -> Callable[[Any, Tensor], Tensor]:
    """Return the model's loss, or a part's, for partial outputs."""
    return next((partial(part.loss, mesh=own) for part, own in parts if part.loss is not None), loss_fn)


def accumulate(module: nn.Module, microbatches: Sequence[Microbatch], divisor: float, parts: Parts) -> list[float]:
    """Forward and backward of every microbatch, and their losses."""
    losses = []
    for number, (x, target) in enumerate(microbatches, start=1):
        with ExitStack() as synced:
            for part, _ in parts:
                synced.enter_context(part.sync(module, number == len(microbatches)))
            loss = loss_of(parts)(module(x), target)
            (loss / divisor).backward()  # type: ignore[no-untyped-call]  # in torch
        losses.append(loss.item())
    return losses


def whole(losses: Sequence[float], parts: Parts) -> list[float]:
    """Return losses of whole sequences from those of parts."""
    found = torch.tensor(losses)
    for part, own in parts:
        if part.in_parts:
            dist.all_reduce(found, group=own.get_group())
            found /= own.size()
    return found.tolist()
