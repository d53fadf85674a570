"""A rank's work in a step of a stack; and the step's verdict."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from pipeproof import StepResult
from pipeproof.core.observe.watching import watch
from pipeproof.core.replicas import Replicas
from pipeproof.core.verdict import Verdict
from pipeproof.own.timed_step import Running, Setup
from pipeproof.pipeline.schedules import build
from pipeproof.pipeline.step import PipelineSchedule
from pipeproof.whitebox import WhiteBox
from pipeproof.wings.primitives import context, data_parallel, experts, recompute, ring, tensor_by_hand, tensor_parallel
from pipeproof.wings.primitives.data_parallel import adam
from pipeproof.wings.primitives.layers import Layers, Microbatch, decoder, loss_fn, microbatches
from pipeproof.wings.primitives.part import RankPart
from pipeproof.wings.primitives.primitive import primitive_of
from pipeproof.wings.primitives.stacks import PIPELINE, Stack
from pipeproof.worlds.worker import RankContext

PARTS: Mapping[str, RankPart] = MappingProxyType(
    {
        **recompute.PARTS,
        **tensor_parallel.PARTS,
        **tensor_by_hand.PARTS,
        **experts.PARTS,
        **context.PARTS,
        **ring.PARTS,
        **data_parallel.PARTS,
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
        optimizer=adam if any(PARTS[name].update for name in stack.parts) else None,
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
class Ready:
    """A rank of a stack with its stages and its share of microbatches; cleared gradients allow another step.

    parts: each with its axes of ``mesh``. modules: what is called, for each of ``stages``. reports: it has the losses.
    """

    mesh: DeviceMesh
    parts: Parts
    stages: Sequence[Layers]
    modules: Sequence[nn.Module]
    microbatches: Sequence[Microbatch]
    divisor: float
    pipeline: PipelineSchedule | None
    reports: bool

    def step(self) -> StepResult:
        """Forward and backward of every microbatch, all gradients reduced, parameters updated."""
        with ExitStack() as around:
            for part, _ in self.parts:
                around.enter_context(part.around())
            if self.pipeline is not None:
                losses = list(self.pipeline.train_step(self.microbatches, loss_divisor=self.divisor).losses)
            else:
                losses = accumulate(self.modules[0], self.microbatches, self.divisor, self.parts)
        each = [(part, stage, own) for part, own in self.parts for stage in self.stages]
        for part, stage, own in each:
            part.finish(stage, own)
        held = {one: at for part, stage, own in each for one, at in part.held(stage, own).items()}
        norm = norm_of(self.stages, self.mesh, in_parts=held)
        for part, stage, own in each:
            if part.update is not None:
                part.update(stage, own)
        every = [one for stage in self.stages for one in stage.parameters()]
        gradients = {one: (one.grad, held[one]) if one in held else one.grad for one in every} if held else None
        reported = whole(losses, self.parts) if self.reports else None
        return StepResult(self.stages, losses=reported, grad_norm=norm, gradients=gradients)


def ready(model: Layers, microbatches: Sequence[Microbatch], *, stack: Stack) -> Ready:
    """Prepare this rank of ``stack`` for its first step."""
    sizes = stack.sizes or {"dp": 1}
    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    axes = {name: primitive_of(name).axes for name in stack.parts}
    parts = [(PARTS[name], mesh[own] if own else mesh) for name, own in axes.items()]
    stages, reports = [model], True
    if stack.has_pipeline:
        rank, ranks = mesh.get_local_rank(PIPELINE), stack.sizes[PIPELINE]
        schedule = build(stack.schedule, ranks=ranks, microbatches=stack.each, virtual=stack.virtual)
        each = len(model) // schedule.n_stages
        stages = [model[number * each : (number + 1) * each] for number in schedule.stages_of(rank)]  # type: ignore[misc]  # of one class
        reports = rank == schedule.placement[-1]
    stages = [watch(one) for one in stages]
    modules: list[nn.Module] = list(stages)
    for part, own in parts:
        modules = [part.apply(module, own) for module in modules]
        microbatches = [part.share(one, own) for one in microbatches]
    pipeline = None
    if stack.has_pipeline:
        pipeline = PipelineSchedule(
            kind=stack.schedule,
            n_microbatches=len(microbatches),
            stages=modules,
            loss_fn=loss_of(parts),
            pp_group=mesh.get_group(PIPELINE),
        )
    divisor = divisor_of(len(microbatches), parts)
    return Ready(mesh, parts, stages, modules, microbatches, divisor, pipeline, reports)


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


def norm_of(stages: Iterable[nn.Module], mesh: DeviceMesh, *, in_parts: Collection[nn.Parameter] = ()) -> float:
    """Compute the norm, equal on every rank of ``mesh``: each gradient counts once, whole or in parts.

    ``in_parts``: parameters cut by hand along tp or sp.
    """
    names = mesh.mesh_dim_names or ()
    squares = {axis: torch.zeros((), dtype=torch.float64) for axis in ("", "ep", "tp", "sp")}
    by_hand = next((axis for axis in ("tp", "sp") if axis in names), "")
    for stage in stages:
        for name, parameter in stage.named_parameters():
            axis = "ep" if experts.is_expert(name) else by_hand if parameter in in_parts else ""
            if parameter.grad is not None:
                norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)
                squares[axis] += (norm.full_tensor() if isinstance(norm, DTensor) else norm).cpu() ** 2

    def sum_along(axis: str, number: Tensor) -> Tensor:
        if axis in names:  # where ranks have separate gradients
            number = number.to(mesh.device_type)
            dist.all_reduce(number, group=mesh.get_group(axis))
        return number.cpu()

    total = sum((sum_along(axis, one) for axis, one in squares.items()), torch.zeros(()))
    return float(sum_along("pp", total).sqrt())
