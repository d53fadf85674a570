"""A pipeline by hand whose stages are cut among replicas, or inside, held against itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from pipeproof import Contract, StageByStage, check_step
from pipeproof.core.verdict import Verdict
from pipeproof.worlds.worker import RankContext

WIDTH, ROWS, COUNT, STAGES, MOST = 6, 4, 3, 2, 0.3
LOSS = nn.functional.mse_loss


Pairs = list[tuple[Tensor, Tensor]]
Change = Callable[[int, int, Tensor], Tensor]  # of a message, by rank and microbatch


@dataclass(frozen=True)
class Plant:
    """What goes wrong, by the rank. ``given`` changes its microbatches; ``plan`` its stage's styles.

    ``sent`` and ``back`` change messages to the other stage, ``times`` is what a microbatch's loss is multiplied by.
    ``done`` changes gradients before they are compared, ``updated`` weights after the optimizer. ``kept``: gradients
    of the step before are not cleared. ``norm`` is what the norm that gradients are clipped by is multiplied by.
    """

    given: Callable[[int, Pairs], Pairs] = lambda rank, every: every
    plan: Mapping[str, ParallelStyle] = field(default_factory=dict)
    sent: Change = lambda rank, microbatch, message: message
    back: Change = lambda rank, microbatch, message: message
    times: Callable[[int, int], float] = lambda rank, microbatch: 1.0
    done: Callable[[int, nn.Module], None] = lambda rank, stage: None
    updated: Callable[[int, nn.Module], None] = lambda rank, stage: None
    kept: Callable[[int], bool] = lambda rank: False
    norm: Callable[[int], float] = lambda rank: 1.0


@dataclass(frozen=True)
class Sharded:
    """How the step is run. ``inner``: how wide each stage is inside. ``copies``: how many ranks have one shard.

    ``tensor``: among how many ranks its layers are cut inside; ``sequence``: what is between those, too. ``tied``: two
    of its layers have one weight. ``late``: gradients are reduced once, after the last backward. ``plant``: what goes
    wrong.
    """

    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    inner: int = WIDTH
    copies: int = 1
    tensor: int = 1
    sequence: bool = False
    tied: bool = False
    late: bool = False
    plant: Plant = Plant()


class Meshes(NamedTuple):
    """Those of the stages, of a stage's replicas, and of the ranks that one replica's layers are cut among."""

    stages: DeviceMesh
    replicas: DeviceMesh
    tensor: DeviceMesh


def stage_of(number: int, way: Sharded, meshes: Meshes) -> nn.Module:
    torch.manual_seed(number)
    layers = [nn.Linear(WIDTH, way.inner), nn.Tanh(), nn.Linear(way.inner, WIDTH)]
    if way.tensor > 1 or way.tied:
        layers += [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)]
    stage = nn.Sequential(*layers)
    if way.tied:
        stage[4].weight = stage[2].weight
    if way.tensor > 1:
        between = Shard(0) if way.sequence else Replicate()
        plan: dict[str, ParallelStyle] = {"0": ColwiseParallel(), "2": RowwiseParallel(output_layouts=between)}
        if way.sequence:
            plan |= {
                "3": SequenceParallel(sequence_dim=0),
                "4": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
            }
        parallelize_module(stage, meshes.tensor, plan | dict(way.plant.plan))
    if meshes.replicas.size() > 1:
        for part in (stage[0], stage) if way.tied else (stage[0], stage[2], stage):
            fully_shard(part, mesh=meshes.replicas, mp_policy=way.policy)
    return stage


def meshes_of(way: Sharded, ranks: int) -> Meshes:
    names = ("stages", "copies", "shards", "tensor")
    shape = STAGES, way.copies, ranks // STAGES // way.copies // way.tensor, way.tensor
    whole = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return Meshes(whole["stages"], whole["copies", "shards"] if way.copies > 1 else whole["shards"], whole["tensor"])


def sharded_steps(context: RankContext, way: Sharded, steps: int = 2) -> list[Verdict]:
    """The verdicts on so many steps of the job."""
    meshes, plant, rank = meshes_of(way, context.ranks), way.plant, context.rank
    number = meshes.stages.get_local_rank()
    stage = stage_of(number, way, meshes)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(rank % (context.ranks // STAGES) // way.tensor)
    found = []
    for _ in range(steps):
        if not plant.kept(rank):
            optimizer.zero_grad()
        microbatches = [tuple(torch.randn(ROWS, WIDTH, generator=draw) for _ in range(2)) for _ in range(COUNT)]
        against = StageByStage(LOSS, optimizer=optimizer, contract=Contract(max_norm=MOST))
        with check_step({number: stage}, microbatches, against=against, rename="{}.{}".format, timeout_s=20) as check:
            losses = _run(number, stage, plant.given(rank, microbatches), context, way)
            plant.done(rank, stage)
            check.gradients()
            norm = _clipped(stage, meshes.stages, times=plant.norm(rank))
            optimizer.step()
            plant.updated(rank, stage)
            check.report(losses=losses or None, norm=norm)
        found.append(check.verdict)
    return found


def _run(number: int, stage: nn.Module, microbatches: Pairs, context: RankContext, way: Sharded) -> list[float]:
    replicas, losses, live = context.ranks // STAGES, list[float](), []
    other = context.rank + (replicas if number == 0 else -replicas)
    for x, _ in microbatches:
        x = _received(x, other).requires_grad_() if number else x
        live.append((x, stage(x)))
        if not number:
            dist.send(way.plant.sent(context.rank, len(live) - 1, live[-1][1].detach().float()), other)
    for m, (x, output) in enumerate(live):
        if isinstance(stage, FSDPModule):
            stage.set_requires_gradient_sync(not way.late or m == COUNT - 1)
        if number:
            loss = LOSS(output.float(), microbatches[m][1])
            losses.append(loss.item())
            (loss * way.plant.times(context.rank, m) / COUNT).backward()
            dist.send(way.plant.back(context.rank, m, x.grad), other)
        else:
            output.backward(_received(x, other).to(output.dtype))
    return losses


def _received(like: Tensor, source: int) -> Tensor:
    message = torch.empty_like(like)
    dist.recv(message, source)
    return message


def _clipped(stage: nn.Module, stages: DeviceMesh, *, times: float) -> float:
    """The norm of all gradients, which are clipped, ``times`` something that it should not be."""
    gradients = [one.grad for one in stage.parameters() if one.grad is not None]
    square: Tensor = sum((_whole(one).double() ** 2).sum() for one in gradients)  # type: ignore[assignment]
    dist.all_reduce(square, group=stages.get_group())
    norm = float(square.sqrt()) * times
    for one in gradients:
        one.mul_(min(1.0, MOST / (norm + 1e-6)))
    return norm


def _whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def multiplied(rank: int, name: str, by: float, *, weight: bool = False) -> Callable[[int, nn.Module], None]:
    """``rank`` multiplies its part of the gradient, or of the ``weight`` itself, of its stage's parameter ``name``."""

    def change(own: int, stage: nn.Module) -> None:
        one = stage.get_parameter(name)
        tensor = one if weight else one.grad
        if own == rank and tensor is not None:
            with torch.no_grad():
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).mul_(by)

    return change


def left_in_parts(rank: int, stage: nn.Module) -> None:
    """What each rank has of the sum of a norm's gradients is taken for all of it."""
    norm = next(one for one in stage.modules() if isinstance(one, nn.LayerNorm))
    for one in norm.parameters():
        one.grad = DTensor.from_local(one.grad.to_local(), one.grad.device_mesh, [Replicate()])


PART = Plant(done=multiplied(3, "0.weight", 3.0))
DROPPED = Plant(times=lambda rank, microbatch: float((rank, microbatch) != (3, 1)))
NORM = Plant(done=left_in_parts)
UPDATE = Plant(updated=multiplied(3, "0.weight", 1.1, weight=True))
