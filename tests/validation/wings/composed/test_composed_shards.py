"""Stages that are cut among ranks, by ``fully_shard`` or inside, held against themselves."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from pipeproof import StageByStage, check_step
from pipeproof.core.reason import Reason
from pipeproof.core.verdict import Verdict
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.golden import golden
from tests.support.sharded_chain import (
    COUNT,
    DROPPED,
    LOSS,
    NORM,
    PART,
    ROWS,
    STAGES,
    UPDATE,
    WIDTH,
    Plant,
    Sharded,
    sharded_steps,
)
from tests.support.steps import backward
from tests.support.sweeps import some

pytestmark = pytest.mark.long

BF16, FP32 = torch.bfloat16, torch.float32


def verdicts(simulated: World, way: Sharded, ranks: int = 4, steps: int = 2) -> list[Verdict]:
    return simulated.run(partial(sharded_steps, steps=steps), way, ranks=ranks)[0]


def first(simulated: World, way: Sharded) -> Verdict:
    return verdicts(simulated, way, steps=1)[0]


WAYS = [
    Sharded(),
    Sharded(inner=5),  # parts of another length on each rank
    Sharded(inner=1),  # and of none
    Sharded(late=True),
    Sharded(MixedPrecisionPolicy(BF16, FP32)),
    Sharded(MixedPrecisionPolicy(BF16, FP32, FP32), late=True),
    Sharded(MixedPrecisionPolicy(BF16)),
    Sharded(MixedPrecisionPolicy(reduce_dtype=BF16)),
    Sharded(tied=True),
    Sharded(tensor=2),
    Sharded(tensor=2, sequence=True),
    Sharded(copies=2),
]
PLAIN = (WAYS[0], *WAYS[2:4], *WAYS[6:8], WAYS[9])  # as others are, that have something more


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", some(WAYS, left=PLAIN))
def test_right_steps_in_shards_pass(way: Sharded, simulated: World) -> None:
    for verdict in verdicts(simulated, way, ranks=8 if way.copies > 1 else 4):
        assert verdict.outcome == "pass", str(verdict)
        laws = {law.name: law for law in verdict.laws}
        assert all(laws[name].checked for name in ("boundaries", "gradient", "updated-parameters"))
        if way.policy == MixedPrecisionPolicy(BF16, FP32) and not way.late:
            # Reduced in fp32, microbatch by microbatch, two ranks' bf16 gradients give one sum.
            assert laws["gradient"].exact == laws["gradient"].checked


WHOLE_NORM = {("gradient", rank, f"{rank // 2}.3.{name}") for rank in range(4) for name in ("weight", "bias")}
ONE_PART = {("gradient", 3, "1.0.weight")}
FAULTS: dict[str, tuple[Sharded, set[Any] | None, tuple[Any, ...] | None]] = {  # what is wrong, and the one cause
    "a part": (Sharded(plant=PART), ONE_PART, ("scale", 3, 1, (), "1.0.weight")),
    "a part, cut inside": (Sharded(plant=PART, tensor=2), ONE_PART, ("scale", 3, 1, (), "1.0.weight")),
    "a lost microbatch": (Sharded(plant=DROPPED), None, ("dropped", 3, 1, (1,), None)),
    "one that is lost, cut inside": (Sharded(plant=DROPPED, tensor=2), None, None),
    "sums in one replica": (Sharded(plant=NORM, tensor=2, sequence=True), WHOLE_NORM, None),
    "the update of a part": (
        Sharded(plant=UPDATE),
        {("updated-parameters", 3, "1.0.weight")},
        ("update", 3, 1, (), "1.0.weight"),
    ),
    "of a part, cut inside": (
        Sharded(plant=UPDATE, tensor=2),
        {("updated-parameters", 3, "1.0.weight")},
        ("update", 3, 1, (), "1.0.weight"),
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", some(FAULTS, left=["a part", "the update of a part"]))
def test_a_fault_in_shards_is_named(name: str, simulated: World) -> None:
    way, places, cause = FAULTS[name]
    verdict = first(simulated, way)
    wrong = {(one.law, one.rank, one.parameter) for one in verdict.mismatches}
    assert verdict.outcome == "fail", str(verdict)
    assert places is None or {one for one in wrong if one[0] in {law for law, *_ in places}} == places, str(verdict)
    named = [(one.kind, one.rank, one.stage, one.microbatches, one.parameter) for one in verdict.causes]
    assert named == [cause] if cause is not None else named, str(verdict)
    assert "put together" not in verdict.details, "that is not told of other causes"


def test_gradients_of_the_step_before_in_shards(simulated: World) -> None:
    verdict = verdicts(simulated, Sharded(plant=Plant(kept=lambda rank: rank >= 2)))[1]
    told = [(cause.kind, cause.rank, cause.stage) for cause in verdict.causes]
    assert told == [("stale-gradient", 2, 1)], str(verdict)


def refused(context: RankContext, kind: str) -> Verdict:
    mesh = init_device_mesh("cpu", (context.ranks,))
    stage: nn.Module = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    if kind == "flat":
        stage = FullyShardedDataParallel(stage, device_id=torch.device("cpu"))
    else:
        stage = fully_shard(stage, mesh=mesh)
    if kind == "evaluated":
        with torch.no_grad():
            stage(torch.randn(ROWS, WIDTH))
    if kind == "kept":
        stage.set_reshard_after_backward(False)  # type: ignore[operator]  # of FSDPModule
    draw = torch.Generator().manual_seed(context.rank)
    microbatches = [(torch.randn(ROWS, WIDTH, generator=draw), torch.randn(ROWS, WIDTH, generator=draw))]
    with check_step({0: stage}, microbatches, against=StageByStage(LOSS), timeout_s=20) as check:
        if kind in ("kept", "evaluated"):
            backward(stage, microbatches, by=LOSS)
        check.gradients()
    return check.verdict


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("flat", "in FullyShardedDataParallel are not checked so: use fully_shard, or check against a SingleDevice"),
        ("kept", "weights that train are whole under fully_shard, as where it keeps them after the backward"),
        ("evaluated", ""),  # what an evaluation leaves is let go when the step begins
    ],
)
def test_what_cannot_be_put_together(kind: str, why: str, simulated: World) -> None:
    verdict = simulated.run(refused, kind, ranks=4)[0]
    assert verdict.outcome == ("unknown" if why else "pass"), str(verdict)
    assert why in verdict.laws[0].note


def cut_between(context: RankContext) -> Verdict:
    """Two stages that pass on parts of a sequence each."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "tensor"))
    number, other = whole["stages"].get_local_rank(), context.rank ^ 2
    stage = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    given, made = (Shard(0), Replicate()) if number else (Replicate(), Shard(0))
    plan = {"0": ColwiseParallel(input_layouts=given), "2": RowwiseParallel(output_layouts=made)}
    parallelize_module(stage, whole["tensor"], plan)
    x, target, part = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), torch.empty(ROWS // 2, WIDTH)
    dist.broadcast(x, 0)
    dist.broadcast(target, 0)
    against = StageByStage(LOSS)
    with check_step({number: stage}, [(x, target)], against=against, rename="{}.{}".format, timeout_s=20) as check:
        if number:
            dist.recv(part, other)
            LOSS(stage(part.requires_grad_()), target).backward()
            dist.send(part.grad, other)
        else:
            output = stage(x)
            dist.send(output.detach().contiguous(), other)
            dist.recv(part, other)
            output.backward(part)
        check.gradients()
    return check.verdict


def test_stages_that_pass_on_parts_are_refused(simulated: World) -> None:
    verdict = simulated.run(cut_between, ranks=4)[0]
    assert verdict.outcome == "unknown", str(verdict)
    assert verdict.law("comparable").reasons == (Reason.RERUN,), str(verdict)
    golden(verdict.law("comparable").note)


def hooks_of(stage: nn.Module) -> list[int]:
    """How many of each kind it has."""
    return [len(one) for name, one in sorted(stage.__dict__.items()) if name.endswith("_hooks")]


def parts_stay(context: RankContext) -> list[bool]:
    """Whether a stage is after the check what it was before it."""
    mesh = init_device_mesh("cpu", (context.ranks,))
    stage = fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH)), mesh=mesh)
    draw = torch.Generator().manual_seed(context.rank)
    microbatches = [(torch.randn(ROWS, WIDTH, generator=draw), torch.zeros(ROWS, WIDTH)) for _ in range(COUNT)]
    kind, members, hooks = type(stage), {*stage.__dict__}, hooks_of(stage)
    with check_step({0: stage}, microbatches, against=StageByStage(LOSS), timeout_s=20) as check:
        backward(stage, microbatches, by=LOSS)
        weight, gradient = stage[0].weight, stage[0].weight.grad
        check.gradients()
    same = stage[0].weight is weight and stage[0].weight.grad is gradient
    dist.barrier()
    passed = check.verdict.outcome == "pass"
    return [passed, same, type(stage) is kind, {*stage.__dict__} == members, hooks_of(stage) == hooks]


def test_the_stage_stays_what_it_was(simulated: World) -> None:
    assert simulated.run(parts_stay, ranks=STAGES) == [[True] * 5] * STAGES


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


def cut_stage(kind: str, mesh: DeviceMesh, rank: int) -> nn.Module:
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


def cut_inside(context: RankContext, kind: str) -> Verdict:
    """The verdict on a step of one stage that is cut among all ranks."""
    mesh = init_device_mesh("cpu", (context.ranks,))
    stage, draw = cut_stage(kind, mesh, context.rank), torch.Generator().manual_seed(1)
    data = [(torch.randn(ROWS, WIDTH, generator=draw), torch.randn(ROWS, WIDTH, generator=draw)) for _ in range(2)]
    with check_step({0: stage}, data, against=StageByStage(LOSS), timeout_s=20) as check:
        torch.manual_seed(context.rank)
        for x, target in data[::-1] if kind == "order" and context.rank else data:
            x = x[context.rank :: context.ranks] if kind == "parts" else x
            target = target[context.rank :: context.ranks] if kind == "parts" else target
            (LOSS(stage(x), target) / 2).backward()
        dist.barrier()
        check.gradients()
    return check.verdict


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("", "PASS"),
        ("dropout", "stage 0 draws random numbers, and layers that are cut among ranks draw others"),
        ("heads", "stage 0 gives something else when it is put together than its ranks gave, all alike"),
        ("by hand", "3.weight is another on ranks 0 and 1, which run the same microbatches, and no DTensor"),
        ("parts", "ranks that have a stage together are given other inputs in their first stage"),
        ("order", "ranks that have a stage together are given other inputs in their first stage"),
        ("unsummed", ""),
    ],
)
def test_a_stage_that_is_cut_inside(kind: str, told: str, simulated: World) -> None:
    verdict = simulated.run(cut_inside, kind, ranks=2)[0]
    outcome = {"": "pass", "unsummed": "fail"}.get(kind, "unknown")
    assert verdict.outcome == outcome, str(verdict)
    assert told in verdict.details
    if outcome == "fail":
        assert verdict.law("boundaries").outcome == "fail", str(verdict)
        golden("\n".join(cause.detail for cause in verdict.causes), numbers=False)
