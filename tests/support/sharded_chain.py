"""A pipeline by hand whose stages are cut among replicas, or inside, held against itself."""

from collections.abc import Sequence
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

from pipeproof import Composed, check_step
from pipeproof.judging.verdict import Verdict
from pipeproof.worlds.worker import RankContext

WIDTH, ROWS, COUNT, STAGES, MOST = 6, 4, 3, 2, 0.3
LOSS = nn.functional.mse_loss


@dataclass(frozen=True)
class Sharded:
    """How the step is run. ``inner``: how wide each stage is inside. ``copies``: how many ranks have one shard.

    ``tensor``: among how many ranks its layers are cut inside; ``sequence``: what is between those, too. ``tied``: two
    of its layers have one weight. ``late``: gradients are reduced once, after the last backward. ``fault``: what goes
    wrong, on the last rank.
    """

    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    inner: int = WIDTH
    copies: int = 1
    tensor: int = 1
    sequence: bool = False
    tied: bool = False
    late: bool = False
    fault: str = ""


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
        parallelize_module(stage, meshes.tensor, plan)
    if meshes.replicas.size() > 1:
        for part in (stage[0], stage) if way.tied else (stage[0], stage[2], stage):
            fully_shard(part, mesh=meshes.replicas, mp_policy=way.policy)
    return stage


def meshes_of(way: Sharded, ranks: int) -> Meshes:
    names = ("stages", "copies", "shards", "tensor")
    shape = STAGES, way.copies, ranks // STAGES // way.copies // way.tensor, way.tensor
    whole = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return Meshes(whole["stages"], whole["copies", "shards"] if way.copies > 1 else whole["shards"], whole["tensor"])


def sharded_steps(context: RankContext, way: Sharded) -> list[Verdict]:
    """The verdicts on two steps of the job."""
    meshes = meshes_of(way, context.ranks)
    number = meshes.stages.get_local_rank()
    stage, last = stage_of(number, way, meshes), context.rank == context.ranks - 1
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(context.rank % (context.ranks // STAGES) // way.tensor)
    found = []
    for _ in range(2):
        optimizer.zero_grad()
        microbatches = [_drawn(draw) for _ in range(COUNT)]
        against = Composed(LOSS, optimizer=optimizer, max_norm=MOST)
        with check_step({number: stage}, microbatches, against=against, rename="{}.{}".format, timeout_s=20) as check:
            losses = _run(number, stage, microbatches, context, way)
            weight = stage[0].weight
            if last and way.fault == "part":
                weight.grad.to_local().mul_(3)
            if way.fault == "norm":
                _leave_in_parts(stage[3])
            check.gradients()
            norm = _clipped(stage, meshes.stages)
            optimizer.step()
            if last and way.fault == "update":
                with torch.no_grad():
                    weight.to_local().mul_(1.1)
            check.report(losses=losses or None, norm=norm)
        found.append(check.verdict)
    return found


def _drawn(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, WIDTH, generator=draw), torch.randn(ROWS, WIDTH, generator=draw)


def _run(
    number: int, stage: nn.Module, microbatches: Sequence[tuple[Tensor, Tensor]], context: RankContext, way: Sharded
) -> list[float]:
    replicas, losses, live = context.ranks // STAGES, list[float](), []
    other = context.rank + (replicas if number == 0 else -replicas)
    for x, _ in microbatches:
        x = _received(x, other).requires_grad_() if number else x
        live.append((x, stage(x)))
        if not number:
            dist.send(live[-1][1].detach().float(), other)
    for m, (x, output) in enumerate(live):
        if isinstance(stage, FSDPModule):
            stage.set_requires_gradient_sync(not way.late or m == COUNT - 1)
        if number:
            loss = LOSS(output.float(), microbatches[m][1])
            losses.append(loss.item())
            lost = way.fault == "dropped" and context.rank == context.ranks - 1 and m == 1
            (loss * (not lost) / COUNT).backward()
            assert x.grad is not None
            dist.send(x.grad, other)
        else:
            output.backward(_received(x, other).to(output.dtype))
    return losses


def _leave_in_parts(norm: nn.Module) -> None:
    """Take what each rank has of the gradient's sum for all of it."""
    for one in norm.parameters():
        assert isinstance(one.grad, DTensor)
        here = one.grad.to_local()
        one.grad = DTensor.from_local(here, one.grad.device_mesh, [Replicate()])


def _received(like: Tensor, source: int) -> Tensor:
    message = torch.empty_like(like)
    dist.recv(message, source)
    return message


def _clipped(stage: nn.Module, stages: DeviceMesh) -> float:
    """The norm of all gradients, which are clipped."""
    gradients = [one.grad for one in stage.parameters() if one.grad is not None]
    square = sum((_whole(one).double() ** 2).sum() for one in gradients)
    assert isinstance(square, Tensor)
    dist.all_reduce(square, group=stages.get_group())
    norm = float(square.sqrt())
    for one in gradients:
        one.mul_(min(1.0, MOST / (norm + 1e-6)))
    return norm


def _whole(gradient: Tensor) -> Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
