"""torch.distributed.pipelining under whitebox.validate: right steps pass to the bit, planted faults are seen."""

import functools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import schedules
from torch.nn.parallel import DistributedDataParallel

from pipeproof.core.contract import Contract
from pipeproof.core.verdict import Verdict
from pipeproof.foreign import HandedBack, WhiteBox, torch_pipelining
from tests.support.golden import golden
from tests.support.steps import Pairs, blocks, pairs

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


@pytest.mark.parametrize(
    "name",
    [
        "ScheduleInterleaved1F1B",
        "ScheduleInterleavedZeroBubble",
        pytest.param("ScheduleZBVZeroBubble", marks=v_shaped),
    ],
)
def test_right_steps_pass_with_every_boundary_watched(whitebox: WhiteBox, name: str) -> None:
    verdict = judged(whitebox, functools.partial(step, name=name))
    assert verdict.verdict == "pass", verdict
    assert verdict.tier == "bitwise"
    assert verdict.law("microbatches").outcome == "pass"
    assert verdict.law("boundaries").exact == STAGES * M * 5 - M


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


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


def several(whitebox: WhiteBox, steps: list[str], *, clears: bool = True) -> Verdict:
    given = pairs(len(steps) * M, width=WIDTH, seed=1)
    return judged(
        whitebox,
        partial(training, clears=clears),
        microbatches=given,
        contract=Contract(operations=steps),
        optimizer=adam,
    )


def test_several_operations_of_one_schedule(whitebox: WhiteBox) -> None:
    verdict = several(whitebox, ["train", "train", "eval", "train"])
    assert verdict.verdict == "pass", verdict
    for law in ("eval", "second-step", "updated-parameters", "microbatches", "boundaries"):
        assert verdict.law(law).outcome == "pass", verdict


def test_gradients_that_are_never_cleared_are_told(whitebox: WhiteBox) -> None:
    verdict = several(whitebox, ["train", "train"], clears=False)
    assert verdict.law("second-step").outcome == "fail"
    assert [one.kind for one in verdict.cause] == ["stale-gradient"]


def test_schedules_that_scale_gradients_scale_what_was_accumulated_again(whitebox: WhiteBox) -> None:
    """As torch does: the second ``step`` divides all that is in ``.grad``."""
    verdict = several(whitebox, ["accumulate", "train"])
    assert verdict.law("accumulation").outcome == "fail"
    assert [one.kind for one in verdict.cause] == ["scale"]
    golden(verdict.cause[0].detail)


def test_the_runtime_for_ones_own_csv_is_judged_too(whitebox: WhiteBox) -> None:
    def own(model: nn.Module, microbatches: list[Any]) -> Any:
        assert isinstance(model, nn.Sequential)
        rank = dist.get_rank()
        stage = pipelining.PipelineStage(model[2 * rank : 2 * rank + 2], rank, 2, torch.device("cpu"))
        schedule = schedules._PipelineScheduleRuntime([stage], M, loss_fn=loss_fn)  # type: ignore[no-untyped-call]
        rows = {0: "0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0", 1: "1F0 1F1 1F2 1F3 1B3 1B2 1B1 1B0"}
        actions = {rank: [schedules._Action.from_str(text) for text in row.split()] for rank, row in rows.items()}
        schedule._prepare_schedule_with_comms(actions)
        return torch_pipelining.step(schedule, microbatches)

    verdict = judged(whitebox, own)
    assert (verdict.verdict, verdict.tier) == ("pass", "bitwise"), verdict


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
            stage._retrieve_recv_activations = functools.partial(_stale, stage._retrieve_recv_activations, {})


def _stale(inner: Callable[[int], Any], kept: dict[int, Any], microbatch: int) -> Any:
    kept[microbatch] = inner(microbatch)
    return tuple(x.detach().requires_grad_() for x in kept[1]) if microbatch == 2 else kept[microbatch]


@pytest.mark.parametrize(
    ("plant", "laws", "where"),
    [
        (unscaled, {"gradient"}, (1, 3, None)),
        (zeroed, {"gradient"}, None),
        (one_forward_twice, {"microbatches", "loss", "gradient"}, (1, 1, None)),
    ],
)
def test_planted_faults_are_seen(whitebox: WhiteBox, plant: Plant, laws: set[str], where: Any) -> None:
    verdict = judged(whitebox, functools.partial(step, name="ScheduleInterleaved1F1B", plant=plant))
    assert verdict.verdict == "fail"
    failed = {law.name for law in verdict.laws if law.outcome == "fail"}
    assert failed >= laws
    first = verdict.mismatches[0]
    if where is not None:
        assert (first.rank, first.stage, first.microbatch) == where, first


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
    return HandedBack([] if replica else handed.modules, sum(losses) / M)


def test_ddp_around_a_stage_averages_with_a_full_backward(whitebox: WhiteBox) -> None:
    verdict = judged(whitebox, functools.partial(replicated, name="ScheduleInterleaved1F1B"), ranks=4)
    assert verdict.law("gradient").outcome == "pass", verdict


@v_shaped
def test_ddp_around_a_stage_does_not_average_where_the_backward_is_split(whitebox: WhiteBox) -> None:
    """A finding in torch: no error, and every gradient is one replica's own."""
    verdict = judged(whitebox, functools.partial(replicated, name="ScheduleZBVZeroBubble"), ranks=4)
    assert verdict.law("gradient").outcome == "fail"


def behind_a_frozen_stage() -> nn.Sequential:
    model = build_model()
    model[0].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("name", "lost"),
    [
        ("ScheduleInterleaved1F1B", False),
        ("ScheduleInterleavedZeroBubble", True),
        pytest.param("ScheduleZBVZeroBubble", True, marks=v_shaped),
    ],
)
def test_a_split_backward_behind_a_frozen_stage_gives_nothing(whitebox: WhiteBox, name: str, lost: bool) -> None:
    """If it passes, torch has mended what FINDINGS.md calls behind-frozen-lost."""
    verdict = judged(whitebox, functools.partial(step, name=name), reference=behind_a_frozen_stage)
    wrong = {one.stage for one in verdict.mismatches if one.law == "presence"}
    assert (verdict.verdict, wrong) == (("fail", {1}) if lost else ("pass", set())), verdict
