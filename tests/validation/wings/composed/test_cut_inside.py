"""Stages that are cut inside: where that they are put together is no evidence, nothing is said to be wrong."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pipeproof import Composed, check_step
from pipeproof.core.verdict import Verdict
from pipeproof.wings.composed.cut_inside import cut_by_hand
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.golden import golden

pytestmark = pytest.mark.long

WIDTH, ROWS = 8, 6
LOSS = nn.functional.mse_loss


class Heads(nn.Module):
    """What it is given is mixed within each head: it is told how many a rank has."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).softmax(-1).flatten(-2)


class Unsummed(RowwiseParallel):
    """Each rank keeps its part of a sum."""

    @staticmethod
    def _prepare_output_fn(layouts: Any, local: Any, module: Any, outputs: Any, mesh: Any) -> Any:  # as torch calls it
        return outputs.to_local()


def stage_of(kind: str, mesh: DeviceMesh, rank: int) -> nn.Module:
    torch.manual_seed(0)
    inner = {"heads": partial(Heads, 2), "dropout": nn.Dropout}.get(kind, nn.Tanh)()
    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH), inner, nn.Linear(WIDTH, WIDTH))
    rows = Unsummed if kind == "unsummed" else RowwiseParallel
    plan = {"0": ColwiseParallel(), "2": rows(output_layouts=Replicate())}
    parallelize_module(stage, mesh, plan)
    if kind == "heads":
        stage[1].heads = 1  # each rank's, as users write it
    if kind == "by hand":
        stage.append(nn.Linear(WIDTH, WIDTH))
        with torch.no_grad():
            stage[3].weight.mul_(rank + 1)
    return stage


def checked(context: RankContext, kind: str) -> Verdict:
    """The verdict on a step of one stage that is cut among all ranks."""
    mesh = init_device_mesh("cpu", (context.ranks,))
    stage, draw = stage_of(kind, mesh, context.rank), torch.Generator().manual_seed(1)
    data = [(torch.randn(ROWS, WIDTH, generator=draw), torch.randn(ROWS, WIDTH, generator=draw)) for _ in range(2)]
    with check_step({0: stage}, data, against=Composed(LOSS), timeout_s=20) as check:
        torch.manual_seed(context.rank)
        for x, target in data[::-1] if kind == "order" and context.rank else data:
            x = x[context.rank :: context.ranks] if kind == "parts" else x
            target = target[context.rank :: context.ranks] if kind == "parts" else target
            (LOSS(stage(x), target) / 2).backward()
        dist.barrier()
        check.gradients()
    return check.verdict


def test_a_right_stage_passes(simulated: World) -> None:
    verdict = simulated.run(checked, "", ranks=2)[0]
    assert verdict.verdict == "pass", str(verdict)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("dropout", "stage 0 draws random numbers, and layers that are cut among ranks draw others"),
        ("heads", "stage 0 gives something else when it is put together than its ranks gave, all alike"),
        ("by hand", "3.weight is another on ranks 0 and 1, which run the same microbatches, and no DTensor"),
        ("parts", "ranks that run the same microbatches are given other parts of them in their first stage"),
        ("order", "ranks that have a stage together are given its microbatches in another order"),
    ],
)
def test_what_may_be_right_is_unknown_and_it_is_said_why(kind: str, told: str, simulated: World) -> None:
    verdict = simulated.run(checked, kind, ranks=2)[0]
    assert verdict.verdict == "unknown", str(verdict)
    assert told in str(verdict)


def test_ranks_that_give_unlike_outputs_are_wrong(simulated: World) -> None:
    verdict = simulated.run(checked, "unsummed", ranks=2)[0]
    assert verdict.law("boundaries").outcome == "fail", str(verdict)
    golden("\n".join(cause.detail for cause in verdict.cause), numbers=False)
    assert "not-repeatable" not in str(verdict)


def test_weights_of_other_parts_and_of_other_replicas_may_differ() -> None:
    parts = [{(0, "w"): (part, digest)} for part, digest in (("0-4", b"a"), ("4-8", b"b"))]
    assert not cut_by_hand(parts, [0, 0])
    whole = [{(0, "w"): ("", digest)} for digest in (b"a", b"b")]
    assert not cut_by_hand(whole, [0, 1])
    golden(cut_by_hand(whole, [0, 0]))
