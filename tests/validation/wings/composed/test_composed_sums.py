"""Replicas of a pipeline, held against themselves: what each adds up is summed over all of them."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from pipeproof import StageByStage, check_step
from pipeproof.core.reason import Reason
from pipeproof.core.tolerance import Floor
from pipeproof.core.verdict import Verdict
from pipeproof.records.rank_part import RankStages, own_name
from pipeproof.wings.composed import sums as sums_of
from pipeproof.wings.composed.shards import OwnShards
from pipeproof.wings.composed.start import Peers
from pipeproof.wings.composed.sums import ReplicaSums
from pipeproof.worlds.side_store import exchange
from pipeproof.worlds.worker import RankContext
from pipeproof.worlds.world import World
from tests.support.chained import LOSS, Faults, Step, backwards, forwards
from tests.support.golden import golden
from tests.support.steps import WIDTH, pairs
from tests.support.sweeps import SWEEP

pytestmark = pytest.mark.long

COUNT, STAGES = 3, 2
Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[Tensor]]


def data(replica: int) -> list[tuple[Tensor, Tensor]]:
    return pairs(COUNT, seed=5 + replica)


def stage_of(number: int) -> nn.Module:
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def reduce(stage: nn.Module, peers: Any, by: float) -> None:
    """Sum gradients over ``peers``, if any are given, and divide them."""
    for parameter in stage.parameters():
        assert parameter.grad is not None
        if peers is not None:
            dist.all_reduce(parameter.grad, group=peers)
        parameter.grad /= by


def pipelines(context: RankContext, fault: str, averaged: bool) -> Verdict:
    """Two stages by hand, in as many replicas as there are ranks for; they average gradients, or add them up."""
    number, replica, replicas = context.rank % STAGES, context.rank // STAGES, context.ranks // STAGES
    peers = [dist.new_group([STAGES * k + p for k in range(replicas)]) for p in range(STAGES)][number]
    peers = dist.group.WORLD if fault == "others" else peers
    stage, microbatches = stage_of(number), data(0 if fault == "same data" else replica)
    kept = {one: torch.ones_like(one) for one in stage.parameters()} if fault == "kept" and number == 0 else {}
    for parameter, old in kept.items():
        parameter.grad = old

    def early(here: Step, flow: Tensor) -> Tensor:
        if fault == "early" and here.microbatch == COUNT - 1:  # the last stage has no flow
            reduce(stage, peers, replicas if averaged else 1)
        return flow

    by, at = StageByStage(LOSS), Step(context.rank, STAGES, context.rank - number)
    own = Faults(flow=early, loss=lambda _, loss: loss if averaged else loss / replicas)
    with check_step({number: stage}, microbatches, against=by, rename="{}.{}".format, timeout_s=20) as check:
        forwards(at, stage, microbatches, own)
        for parameter in kept if replica else ():
            parameter.grad = None
        backwards(at, COUNT, own)
        if (fault, number) not in (("unreduced", 1), ("early", 0)):
            reduce(stage, peers, replicas if averaged and (fault, number) != ("unscaled", 0) else 1)
        if fault == "unreduced" and number == 1 and averaged:
            reduce(stage, None, replicas)
        if fault == "noise" and context.rank == 2:
            next(stage.parameters()).grad += torch.randn(WIDTH, WIDTH)  # type: ignore[operator]  # it has one
        if fault == "one rank" and context.rank == 2:
            next(stage.parameters()).grad *= 2  # type: ignore[operator]  # it has one
        check.gradients()
        check.report(losses=at.losses or None)
    return check.verdict


RIGHT, UNSPLIT = "right", "unsplit"
BETWEEN: list[Any] = [  # the fault, whether replicas average, the kind that is named, and where gradients are wrong
    ("", True, RIGHT, set()),
    ("", False, RIGHT, set()),
    ("same data", True, UNSPLIT, set()),
    ("unreduced", True, "not-reduced", {1, 3}),
    pytest.param("unreduced", False, "not-reduced", {1, 3}, marks=SWEEP),
    ("unscaled", True, "scale", {0, 2}),
    ("one rank", True, "scale", {2}),
    ("early", True, "not-reduced", {0, 2}),
    ("kept", True, "stale-gradient", {0, 2}),
    ("noise", True, None, {2}),
    ("others", True, None, {0, 1, 2, 3}),
]


@pytest.mark.parametrize(("fault", "averaged", "kind", "ranks"), BETWEEN)
def test_what_is_wrong_between_replicas_is_named(
    fault: str, averaged: bool, kind: str | None, ranks: set[int], simulated: World
) -> None:
    verdicts = simulated.run(pipelines, fault, averaged, ranks=2 * STAGES)
    assert len({verdict.details for verdict in verdicts}) == 1, "all ranks have one verdict"
    verdict: Verdict = verdicts[0]
    outcome = {RIGHT: "pass", UNSPLIT: "unknown"}.get(kind or "", "fail")
    assert verdict.outcome == outcome, str(verdict)
    assert {mismatch.rank for mismatch in verdict.mismatches if mismatch.law == "gradient"} == ranks
    if kind == RIGHT:
        assert (verdict.law("gradient").checked, verdict.law("loss").checked) == (16, 2 * COUNT)
    elif kind == UNSPLIT:
        golden(verdict.details.splitlines()[0])
    elif kind is None:
        assert verdict.causes == ()
        golden(verdict.undecided[0], numbers=False)
    else:
        assert verdict.causes[0].kind == kind, str(verdict)
        factors = {cause.detail for cause in verdict.causes if cause.kind == "scale"}
        assert factors <= {"2 times"}, "by so much its gradients are too large"


@pytest.mark.sweep
@pytest.mark.parametrize("averaged", [True, False])
def test_replicas_in_processes_are_right(averaged: bool, world: World) -> None:
    assert world.run(pipelines, "", averaged, ranks=2 * STAGES)[0].outcome == "pass"


def in_ddp(context: RankContext, hook: Hook | None = None, factor: float = 1.0) -> Verdict:
    """A model of one stage on each rank, whose gradients DDP averages, through a ``hook``; one comes out so wrong."""
    stage = stage_of(0)
    replicas = DistributedDataParallel(stage)
    if hook is not None:
        replicas.register_comm_hook(None, hook)  # type: ignore[no-untyped-call]  # in torch
    microbatches = data(context.rank)
    with check_step({0: stage}, microbatches, against=StageByStage(LOSS), timeout_s=20) as check:
        losses = []
        for number, (x, target) in enumerate(microbatches):
            replicas.require_backward_grad_sync = number == COUNT - 1
            loss = LOSS(replicas(x), target)
            losses.append(loss.item())
            (loss / COUNT).backward()
        stage[0].weight.grad *= factor
        check.gradients()
        check.report(losses=losses)
    return check.verdict


def halved_digits(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Averages, and rounds coarsely."""
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket).then(
        lambda done: done.value().mul(64).round().div(64)
    )


def averaged(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Averages, as it is without one."""
    return default_hooks.allreduce_hook(dist.group.WORLD, bucket)


@pytest.mark.parametrize(
    ("hook", "factor", "verdict"),
    [
        (None, 1.0, "pass"),
        (None, 1 + 5e-5, "unknown"),  # more than two runs differ by
        (None, -1.0, "fail"),
        (default_hooks.allreduce_hook, -1.0, "fail"),
        (default_hooks.fp16_compress_hook, 1.0, "unknown"),
        (halved_digits, 1.0, "unknown"),
        (averaged, 1.0, "pass"),
        (averaged, -1.0, "unknown"),
    ],
)
def test_a_hook_of_ddp_proves_nothing(hook: Hook | None, factor: float, verdict: str, world: World) -> None:
    found: Verdict = world.run(in_ddp, hook, factor, ranks=2)[0]
    law = found.law("gradient")
    assert law.checked == 8 or verdict == "unknown"
    assert (found.outcome, law.outcome) == (verdict, verdict), str(found)
    hooked = hook is not None and verdict == "unknown"
    assert (Reason.HOOKS in law.reasons, f"hook {getattr(hook, '__qualname__', '')} may" in law.note) == (
        hooked,
        hooked,
    )


def in_one(context: RankContext, tied: bool, rate: float) -> Verdict:
    """Two stages on each rank, with one weight if ``tied``; gradients are averaged. Rank 1 has another ``rate``."""
    stages, microbatches = {number: stage_of(number) for number in range(STAGES)}, data(context.rank)
    if tied:
        stages[1][0].weight = stages[0][0].weight  # type: ignore[index]  # they are sequences
    parameters = list({id(one): one for stage in stages.values() for one in stage.parameters()}.values())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    by = StageByStage(LOSS, optimizer=optimizer)
    with check_step(stages, microbatches, against=by, rename="{}.{}".format, timeout_s=20) as check:
        for x, target in microbatches:
            (LOSS(stages[1](stages[0](x)), target) / COUNT).backward()
        for one in parameters:
            assert one.grad is not None
            dist.all_reduce(one.grad)
            one.grad /= context.ranks
        check.gradients()
        optimizer.param_groups[0]["lr"] *= rate if context.rank else 1.0
        optimizer.step()
        check.report()
    return check.verdict


@pytest.mark.parametrize("tied", [False, True])
def test_one_ranks_wrong_step_is_its_own(tied: bool, simulated: World) -> None:
    assert simulated.run(in_one, tied, 1.0, ranks=2)[0].outcome == "pass"
    verdict = simulated.run(in_one, tied, 2.0, ranks=2)[0]
    assert (verdict.outcome, verdict.causes[0].kind, verdict.causes[0].rank) == ("fail", "update", 1), str(verdict)


def stuck(context: RankContext) -> tuple[Verdict, float]:
    """On rank 1 the check raises while it sums; and how long it takes."""
    if context.rank:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sums_of, "length_in_pieces", broken)
            return timed(context)
    return timed(context)


def broken(one: Tensor) -> float:
    raise MemoryError("no room for a norm")


def timed(context: RankContext) -> tuple[Verdict, float]:
    began = monotonic()
    return in_ddp(context), monotonic() - began


def test_who_raises_while_it_sums_leaves_nobody_waiting() -> None:
    with World() as world:
        (one, one_s), (other, other_s) = world.run(stuck, ranks=2, timeout_s=40)
    assert {one.outcome, other.outcome} == {"unknown"}
    assert one.law("comparable").reasons == other.law("comparable").reasons == (Reason.CRASH,)
    assert {verdict.law("comparable").note.partition(":")[0] for verdict in (one, other)} == {"rank 1"}
    assert max(one_s, other_s) < 20, "nobody waits for the group's own bound"


def begun_anew(context: RankContext, folder: str) -> tuple[list[tuple[str, int]], list[Any]]:
    """The verdicts on two steps, and how many groups there are; the same after ranks met anew; and groups' bounds."""
    bounds, made, groups = list[Any](), dist.new_group, dist.distributed_c10d._world.pg_map

    def noted(*given: Any, **named: Any) -> Any:
        bounds.append(named.get("timeout"))
        return made(*given, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", noted)
        found = [(in_ddp(context).outcome, len(groups)) for _ in range(2)]
        dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/store", context.ranks)  # type: ignore[attr-defined]  # not in its __all__
        dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.ranks)
        return [*found, (in_ddp(context).outcome, len(dist.distributed_c10d._world.pg_map))], bounds


def test_groups_are_made_once_and_their_waits_bounded(tmp_path: Path) -> None:
    with World() as world:
        found = world.run(begun_anew, str(tmp_path), ranks=2, timeout_s=60)
    assert found == [([("pass", 2)] * 3, [timedelta(seconds=20)] * 2)] * 2


def floors(context: RankContext, opposite: bool) -> tuple[Floor, Floor]:
    """What rounding of one replica, and what is nothing but rounding there, is of the sum of two."""
    own = OwnShards(RankStages({0: nn.Linear(2, 1, bias=False)}, own_name))
    peers = Peers(context.rank, [[0]] * context.ranks, 20)
    sums = ReplicaSums(exchange(), peers, own)
    sign = -1.0 if context.rank and opposite else 1.0
    sums.sum({"weight": torch.tensor([[3.0 * sign, 4.0 * sign + 0.001 * context.rank]])})
    return sums.floor("weight", Floor(1e-7, 1e-6, 0.5)), sums.floor("weight", Floor(0.0, 0.0, 0.0, size=1e-6))


@pytest.mark.parametrize("opposite", [True, False])
def test_rounding_of_what_cancels_is_large(opposite: bool, world: World) -> None:
    grown = 10 / (0.001 if opposite else 10)
    for own, noise in world.run(floors, opposite, ranks=2):
        assert own.rounding == pytest.approx(1e-6 * grown, rel=1e-3)
        assert own.permutation == pytest.approx(1e-7 * grown, rel=1e-3)
        assert own.fault == pytest.approx(0.5 * 5 / (0.001 if opposite else 10), rel=1e-3)
        assert not noise.noise
        assert noise.rounding == pytest.approx(2e-6 / (0.001 if opposite else 10), rel=1e-3)
