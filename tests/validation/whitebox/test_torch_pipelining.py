"""torch.distributed.pipelining under whitebox.validate: right steps pass to the bit, planted faults are observed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules
from torch.nn.parallel import DistributedDataParallel

from pipeproof import StepResult
from pipeproof.core.contract import Contract
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox, torch_pipelining
from tests.support.golden import golden
from tests.support.steps import Pairs, adam, blocks, pairs

WIDTH, STAGES, M = 16, 4, 4
loss_fn = nn.functional.mse_loss


build_model = partial(blocks, STAGES, width=WIDTH)


def data(rows: int = 3) -> Pairs:
    return pairs(M, rows=rows, width=WIDTH, seed=1)


def built(name: str, model: nn.Module, **options: Any) -> Any:
    """This rank's schedule of the class ``name``, two stages on each of two ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    held = (rank, STAGES - 1 - rank) if name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV") else (rank, rank + ranks)
    assert isinstance(model, nn.Sequential)
    stages = [pipelining.PipelineStage(model[index], index, STAGES, torch.device("cpu")) for index in held]
    return getattr(pipelining, name)(stages, M, loss_fn=loss_fn, **options)


Plant = Callable[[Any], None]


def step(model: nn.Module, microbatches: list[Any], *, name: str, plant: Plant = lambda schedule: None) -> Any:
    schedule = built(name, model)
    plant(schedule)
    return torch_pipelining.step(schedule, microbatches)


def judged(whitebox: WhiteBox, of_step: Any, **more: Any) -> Verdict:
    wanted = {"reference": build_model, "microbatches": data(), "ranks": 2, "loss_fn": loss_fn} | more
    return whitebox.validate(of_step, **wanted)


v_shaped = pytest.mark.skipif(
    torch.__version__ < "2.13", reason="two adjacent stages on a rank: FINDINGS.md, messages-to-oneself"
)


def training(model: nn.Module, operations: Iterator[tuple[str, list[Any]]], *, clears: bool = True) -> Iterator[Any]:
    schedule = built("ScheduleInterleaved1F1B", model)
    own = nn.ModuleList(stage.submod for stage in schedule._stages)
    optimizer = adam(own)
    for operation, microbatches in operations:
        own.train(operation != "eval")
        made = torch_pipelining.step(schedule, microbatches, operation=operation)
        if operation == "train":
            optimizer.step()
        yield made
        if operation == "train" and clears:
            optimizer.zero_grad()


def unscaled(schedule: Any) -> None:
    schedule.scale_grads = False


def zeroed(schedule: Any) -> None:
    """What stage 2 sends back is zero."""
    for stage in torch_pipelining.stages_of(schedule):
        if stage.stage_index == 2:
            stage.submod.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 0,))


def one_forward_twice(schedule: Any) -> None:
    """Stage 1 computes microbatch 1 where it should compute microbatch 2."""
    for stage in torch_pipelining.stages_of(schedule):
        if stage.stage_index == 1:
            stage._retrieve_recv_activations = partial(_stale, stage._retrieve_recv_activations, {})


def _stale(inner: Callable[[int], Any], kept: dict[int, Any], microbatch: int) -> Any:
    kept[microbatch] = inner(microbatch)
    return tuple(x.detach().requires_grad_() for x in kept[1]) if microbatch == 2 else kept[microbatch]


def planted(plant: Plant) -> Any:
    return partial(step, name=INTERLEAVED, plant=plant)


def replicated(model: nn.Module, microbatches: list[Any], *, name: str) -> Any:
    """P 2 x DP 2: each replica takes half of the microbatches, and DDP averages; the first replica hands back."""
    rank = dist.get_rank()
    replica, place = divmod(rank, 2)
    pipes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    peers = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    held = (place, STAGES - 1 - place) if name == "ScheduleZBVZeroBubble" else (place, place + 2)
    assert isinstance(model, nn.Sequential)
    stages = [
        pipelining.PipelineStage(
            DistributedDataParallel(model[index], process_group=peers[place]),
            index,
            STAGES,
            torch.device("cpu"),
            group=pipes[replica],
        )
        for index in held
    ]
    half = microbatches[replica * 2 : replica * 2 + 2]
    handed = torch_pipelining.step(getattr(pipelining, name)(stages, 2, loss_fn=loss_fn), half)
    rows: list[Any] = [None] * 4
    dist.all_gather_object(rows, [float(loss) for loss in handed.losses or ()])
    losses = [loss for row in rows for loss in row]
    return StepResult([] if replica else handed.modules, sum(losses) / M)


def behind_a_frozen_stage() -> nn.Sequential:
    model = build_model()
    model[0].requires_grad_(False)
    return model


def own_csv(model: nn.Module, microbatches: list[Any]) -> Any:
    """By the runtime for one's own CSV."""
    assert isinstance(model, nn.Sequential)
    rank = dist.get_rank()
    stage = pipelining.PipelineStage(model[2 * rank : 2 * rank + 2], rank, 2, torch.device("cpu"))
    schedule = schedules._PipelineScheduleRuntime([stage], M, loss_fn=loss_fn)  # type: ignore[no-untyped-call]
    rows = {0: "0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0", 1: "1F0 1F1 1F2 1F3 1B3 1B2 1B1 1B0"}
    actions = {rank: [schedules._Action.from_str(text) for text in row.split()] for rank, row in rows.items()}
    schedule._prepare_schedule_with_comms(actions)
    return torch_pipelining.step(schedule, microbatches)


INTERLEAVED, ZERO_BUBBLE, ZBV = "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"


@dataclass(frozen=True)
class Case:
    """A step, beside what; laws of this outcome, kinds of causes, and where it is wrong first; torch 2.13 or newer."""

    step: Any
    more: dict[str, Any] = field(default_factory=dict)
    outcome: str = "pass"
    laws: tuple[str, ...] = ("microbatches", "boundaries")
    causes: list[str] | None = None
    where: tuple[int, int, int | None] | None = None
    new: bool = False


def several(*steps: str) -> dict[str, Any]:
    given = pairs(len(steps) * M, width=WIDTH, seed=1)
    return {"microbatches": given, "contract": Contract(operations=[*steps]), "optimizer": adam}


FOUR, FROZEN = {"ranks": 4}, {"reference": behind_a_frozen_stage}
CASES = {
    **{name: Case(partial(step, name=name), new=name == ZBV) for name in (INTERLEAVED, ZERO_BUBBLE, ZBV)},
    "own csv": Case(own_csv),
    "several operations": Case(
        training,
        several("train", "train", "eval", "train"),
        laws=("eval", "second-step", "updated-parameters", "microbatches", "boundaries"),
    ),
    "never cleared": Case(
        partial(training, clears=False), several("train", "train"), "fail", ("second-step",), ["stale-gradient"]
    ),
    # As torch does: the second ``step`` divides all that is in ``.grad``.
    "scaled again": Case(training, several("accumulate", "train"), "fail", ("accumulation",), ["scale"]),
    "not scaled": Case(planted(unscaled), {}, "fail", ("gradient",), where=(1, 3, None)),
    "zero sent back": Case(planted(zeroed), {}, "fail", ("gradient",)),
    "one forward twice": Case(
        planted(one_forward_twice), {}, "fail", ("microbatches", "loss", "gradient"), where=(1, 1, None)
    ),
    "ddp": Case(partial(replicated, name=INTERLEAVED), FOUR, laws=("gradient",)),
    # A finding in torch: no error, and every gradient is one replica's own.
    "ddp, split backward": Case(partial(replicated, name=ZBV), FOUR, "fail", ("gradient",), new=True),
    "frozen": Case(partial(step, name=INTERLEAVED), FROZEN),
    # Where one of these passes, torch has mended what FINDINGS.md calls behind-frozen-lost.
    "frozen, zero bubble": Case(partial(step, name=ZERO_BUBBLE), FROZEN, "fail", ("presence",), where=(1, 1, None)),
    "frozen, zbv": Case(partial(step, name=ZBV), FROZEN, "fail", ("presence",), new=True),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [pytest.param(name, marks=v_shaped if CASES[name].new else ()) for name in CASES])
def test_schedules_of_torch_are_judged(whitebox: WhiteBox, name: str) -> None:
    case = CASES[name]
    verdict = judged(whitebox, case.step, **case.more)
    assert verdict.outcome == case.outcome, verdict
    assert {verdict.law(law).outcome for law in case.laws} == {case.outcome}, verdict
    assert case.causes in (None, [one.kind for one in verdict.causes])
    if name in (INTERLEAVED, ZERO_BUBBLE, ZBV, "own csv"):
        assert verdict.tier == "bitwise"
        assert name == "own csv" or verdict.law("boundaries").exact == STAGES * M * 5 - M
    if case.where is not None:
        first = verdict.mismatches[0]
        assert (first.rank, first.stage, first.microbatch) == case.where, first
    if "frozen" in name:
        wrong = {one.stage for one in verdict.mismatches if one.law == "presence"}
        assert wrong == ({1} if case.outcome == "fail" else set())
    if name == "scaled again":
        golden(verdict.causes[0].detail)
