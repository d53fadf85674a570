"""Data parallel, shards and recompute around a pipeline, two stages by two replicas. ``fault`` plants a bug."""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pipeproof import PipelineSchedule, watch

RANKS = 4
REPLICAS = [0, 1, 0, 1]  # of each rank: the inner dimension of the mesh
WIDTH = 12


class Block(nn.Module):
    """Its dropout is seeded by what comes in, so that it is the same on any rank, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.25))
        self.recompute: Any = None

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(int(x.detach().view(torch.int32).sum()))
        return x + (self.inner(x) if self.recompute is None else self.recompute(self.inner, x))


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(4)))


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))


def own_stage(model: Any, mesh: DeviceMesh) -> Any:
    first = 2 * mesh.get_local_rank("pp")
    return watch(model[first : first + 2])


def train(module: nn.Module, microbatches: list, mesh: DeviceMesh, kind: str, divisor: float | None = None) -> Any:
    schedule = PipelineSchedule(
        kind=kind,
        n_microbatches=len(microbatches),
        stages=[module],
        loss_fn=nn.functional.mse_loss,
        pp_group=mesh.get_group("pp"),
    )
    return schedule.train_step(microbatches, loss_divisor=divisor)


def replicated(model: nn.Module, microbatches: list, *, kind: str = "1F1B", fault: str = "") -> tuple:
    mesh = make_mesh()
    stage = own_stage(model, mesh)
    alone = fault == "not reduced" and mesh.get_local_rank("pp") == 1
    module = stage if alone else DistributedDataParallel(stage, process_group=mesh.get_group("dp"))
    divisor = 2 * len(microbatches) if fault == "mean for sum" else None  # as if replicas were added up
    result = train(module, microbatches, mesh, kind, divisor)
    return stage, result.losses, result.grad_norm


def sharded(model: nn.Module, microbatches: list, *, kind: str = "1F1B", fault: str = "") -> tuple:
    mesh = make_mesh()
    stage = own_stage(model, mesh)
    for block in stage:
        fully_shard(block, mesh=mesh["dp"])
    result = train(fully_shard(stage, mesh=mesh["dp"]), microbatches, mesh, kind)
    norm = torch.tensor(result.grad_norm)
    if fault == "norm of own shards":
        squares = torch.stack([p.grad.to_local().double().square().sum() for p in stage.parameters()]).sum()
        dist.all_reduce(squares, group=mesh.get_group("pp"))  # over the stages, but not over the shards
        norm = squares.sqrt()
    return stage, result.losses, norm


def sharded_by_hand(model: nn.Module, microbatches: list, *, kind: str = "1F1B", fault: str = "") -> tuple:
    mesh = make_mesh()
    stage = own_stage(model, mesh)
    result = train(stage, microbatches, mesh, kind)
    half, own = WIDTH // 2, mesh.get_local_rank("dp")
    names = {parameter: name for name, parameter in model.named_parameters()}
    at = 1 - own if fault == "wrong order" else own
    index = slice(at * half, (at + 1) * half)
    gradients = {}
    for parameter in stage.parameters():
        dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
        gradients[names[parameter]] = (parameter.grad[own * half : (own + 1) * half] / 2, index)
    return gradients, result.losses


def recomputing(
    model: nn.Module, microbatches: list, *, kind: str = "1F1B", reentrant: bool = False, fault: str = ""
) -> tuple:
    mesh = make_mesh()
    stage = own_stage(model, mesh)
    kept = fault != "other dropout"
    # Not the first: the reentrant kind gives no gradients where no input wants one.
    stage[1].recompute = partial(checkpoint, use_reentrant=reentrant, preserve_rng_state=kept)
    module = DistributedDataParallel(stage, process_group=mesh.get_group("dp"))
    result = train(module, microbatches, mesh, kind)
    return stage, result.losses, result.grad_norm
