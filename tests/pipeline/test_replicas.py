"""Stages in DDP and under fully_shard: right gradients, reduced once a step, whatever the schedule does in between."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from pipeproof.pipeline.step import PipelineSchedule
from pipeproof.worlds.rank_report import RankFailed
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.steps import backward, blocks, loss_fn, pairs

MICROBATCHES = 4  # of each of two replicas


build_model = partial(blocks, width=7)
data = partial(pairs, 2 * MICROBATCHES, rows=3, width=7, seed=1)


def run(context: RankContext, around: str, kind: str, steps: int) -> dict[str, Any]:
    """Train two stages by two replicas; what came out, the largest error of a gradient, and how often what was done."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    first = 2 * mesh.get_local_rank("pp")
    names = {p: name for name, p in build_model().named_parameters()}
    stage = build_model()[first : first + 2]
    module: nn.Module = stage
    if around == "ddp":
        module = DistributedDataParallel(stage, process_group=mesh.get_group("dp"))
    else:
        for block in stage:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(stage, mesh=mesh["dp"])
    schedule = PipelineSchedule(
        kind=kind,
        n_microbatches=MICROBATCHES,
        stages=[module],
        loss_fn=loss_fn,
        pp_group=mesh.get_group("pp"),
    )
    own = data()[mesh.get_local_rank("dp") :: 2]
    for _ in range(steps - 1):
        schedule.accumulate(own)
    accumulated: Counter[str] = Counter()
    for name, parameter in stage.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: accumulated.update([name]))
    result = schedule.train_step(own, max_norm=1e6)
    expected = reference(steps)
    wanted = [expected[name] for name in names.values() if first <= int(name[0]) < first + 2]
    observed = [p.grad.full_tensor() if around == "fully_shard" else p.grad for p in stage.parameters()]
    error = max(float((one - two).norm() / two.norm()) for one, two in zip(observed, wanted, strict=True))
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm().item()
    fired = set(accumulated.values())
    return {"error": error, "norm": result.grad_norm / norm, "fired": fired, "undeferred": schedule.undeferred}  # type: ignore[operator]


def reference(steps: int) -> dict[str, Tensor]:
    backward(model := build_model(), data(), divisor=2 * MICROBATCHES / steps)
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["1F1B", "ZB-H1"])
@pytest.mark.parametrize(("around", "steps"), [("ddp", 1), ("fully_shard", 1), ("ddp", 2), ("fully_shard", 2)])
def test_gradients_are_those_of_all_replicas(world: World, around: str, kind: str, steps: int) -> None:
    for rank, made in enumerate(world.run(run, around, kind, steps, ranks=4)):
        assert made["error"] < 1e-6
        assert made["norm"] == pytest.approx(1, abs=1e-6)
        split = around == "fully_shard" and kind == "ZB-H1"
        why = {rank // 2: ("the hooks of fully_shard reduce gradients in whole backwards only",)} if split else {}
        assert made["undeferred"] == why
        assert made["fired"] == ({MICROBATCHES} if around == "ddp" else {1}), "a shard has its gradient once reduced"


class Uneven(nn.Module):
    """A parameter that only the first replica uses, and one that none does."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.own, self.some, self.none = (nn.Linear(2, 2, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.own(x)
        return self.some(y) if self.rank == 0 else y


def uneven(context: RankContext) -> list[Any]:
    """The gradients of the two."""
    torch.manual_seed(0)
    inner = Uneven(context.rank)
    module = DistributedDataParallel(inner)
    alone = [dist.new_group([rank]) for rank in range(2)][context.rank]
    schedule = PipelineSchedule(kind="1F1B", n_microbatches=1, stages=[module], loss_fn=loss_fn, pp_group=alone)
    schedule.train_step([(torch.ones(1, 2), torch.zeros(1, 2))])
    return [inner.some.weight.grad, inner.none.weight.grad]


def test_a_gradient_that_one_replica_lacks_is_there_on_all_and_one_that_all_lack_on_none(world: World) -> None:
    (some, none), (same, neither) = world.run(uneven, ranks=2)
    assert some.any()
    assert torch.equal(some, same)
    assert none is neither is None


def tied_in_shards(context: RankContext) -> None:
    mesh = init_device_mesh("cpu", (1,))
    stages = [fully_shard(nn.Linear(2, 2), mesh=mesh), nn.Linear(2, 2)]
    tied = [{0: "weight", 1: "weight"}]
    PipelineSchedule(kind="interleaved", n_microbatches=1, stages=stages, loss_fn=loss_fn, tied=tied)


@pytest.mark.sweep
def test_tied_parameters_in_shards_are_refused_in_a_sentence(world: World) -> None:
    with pytest.raises(RankFailed, match="tied weight: stage 0 has it in shards: leave tied ones out of fully_shard"):
        world.run(tied_in_shards, ranks=1)
