"""Part i: what `check_step` adds to a step that it holds against the model on one device, or against itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from bench_ranks import Turns, conditions, on_ranks, own_place, step_seconds, take_turns
from bench_table import Row
from torch import Tensor, nn

from pipeproof import PipelineSchedule, SingleDevice, StageByStage, check_step
from pipeproof.worlds.accelerator import CPU

MICROBATCHES, LAYERS = 8, 8
_LIMIT_S = 20.0  # per row
loss_fn = nn.functional.mse_loss


@dataclass(frozen=True)
class Job:
    """A model of equal layers, each made by ``layer(width)``, and microbatches (rows, width)."""

    layer: Callable[[int], nn.Module]
    width: int
    rows: int


def _linear(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


def _block(width: int) -> nn.Module:
    return nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, norm_first=True)


JOBS = {  # what a check adds is made of what stages hand over, and a step of what they compute
    "width 64, 32 rows": Job(_linear, 64, 32),
    "width 512, 32 rows": Job(_linear, 512, 32),
    "width 512, 512 rows": Job(_linear, 512, 512),
    "blocks, width 256, 256 rows": Job(_block, 256, 256),
    "blocks, width 512, 256 rows": Job(_block, 512, 256),
}


def measure(*, ranks: int, rounds: int, device: str = CPU, limit_s: float = _LIMIT_S) -> list[Row]:
    """A row per job: milliseconds of a step alone, and of one that is checked; the check waits for the reference."""
    taken = on_ranks(ranks, _rank, ranks, Turns(rounds, limit_s), device=device)
    return [_row(name, [rank[name] for rank in taken]) for name in JOBS]


def _rank(rank: int, ranks: int, turns: Turns) -> dict[str, Any]:
    return {name: _steps(job, rank, ranks, turns=turns) for name, job in JOBS.items()}


def _build(job: Job) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(job.layer(job.width) for _ in range(LAYERS))).to(own_place())


def _steps(job: Job, rank: int, ranks: int, *, turns: Turns) -> dict[str, Any]:
    each = LAYERS // ranks
    stage = _build(job)[rank * each : (rank + 1) * each]  # a slice keeps the names of the whole
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)
    schedule = PipelineSchedule(
        kind="1f1b", n_microbatches=MICROBATCHES, stages=[stage], loss_fn=loss_fn, optimizer=optimizer
    )
    data = _data(job)
    steps = {
        "plain": lambda: schedule.train_step(data, max_norm=1.0),
        "checked": lambda: _checked(schedule, stage, SingleDevice(lambda: _build(job), loss_fn), data),
        "composed": lambda: _checked(schedule, stage, StageByStage(loss_fn), data),
        "one stage": lambda: _checked(schedule, stage, StageByStage(loss_fn, stages="one by one"), data),
    }
    return take_turns(steps, lambda: None, turns)


def _data(job: Job) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    drawn = torch.randn(MICROBATCHES, 2, job.rows, job.width, generator=draw).to(own_place())
    return [(x, y) for x, y in drawn]


def _checked(
    schedule: PipelineSchedule,
    stage: nn.Module,
    against: SingleDevice | StageByStage,
    data: Sequence[tuple[Tensor, Tensor]],
) -> None:
    with check_step({dist.get_rank(): stage}, data, against=against) as check:
        result = schedule.wrap(check.wrap).train_step(data, max_norm=1.0)
        check.report(losses=result.losses, loss=result.loss, norm=result.grad_norm)
    check.verdict.raise_if_failed()


def _row(name: str, taken: list[dict[str, Any]]) -> Row:
    seconds = step_seconds(taken, 1)
    milliseconds = {variant: median(values) * 1e3 for variant, values in seconds.items()}
    plain = milliseconds["plain"]
    adds = {name: (milliseconds[name] - plain) / plain for name in ("checked", "composed", "one stage")}
    told = ", ".join(f"{name} adds {steps:.2f} steps" for name, steps in adds.items())
    return Row(name, milliseconds, note=f"{told}; {conditions(taken)}")
