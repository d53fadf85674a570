"""Part b: wall time over simulated time, with stages that sleep instead of computing, so that ranks need no cores."""

import time
from statistics import median
from typing import Any

import torch
from bench_ranks import Turns, conditions, on_ranks, step_seconds, take_turns
from bench_table import Row, Target, ratio
from bench_variants import SCHEDULES, Case, clear_gradients, schedule_of, variants
from torch import Tensor, nn

from pipeline import Action, Kind, Schedule, simulate

FORWARD_S, BACKWARD_S = 5e-3, 10e-3  # per rank and microbatch; a stage takes its share
MICROBATCHES = 32
_LIMIT_S = 50.0  # per schedule


class _Sleep(torch.autograd.Function):
    """The identity, after a sleep each way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, share: int) -> Tensor:
        ctx.share = share
        time.sleep(FORWARD_S / share)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(BACKWARD_S / ctx.share)
        return gradient, None


class Sleeper(nn.Module):
    """A stage with one parameter that takes 1/``share`` of a rank's time for a microbatch."""

    def __init__(self, share: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self._share = share

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x * self.weight, self._share)


def measure(*, ranks: int, rounds: int) -> list[Row]:
    """A row per schedule: milliseconds per step, ours over the simulated time and over torch."""
    taken = on_ranks(ranks, _rank, ranks, rounds)
    return [_row(name, ranks, [rank[name] for rank in taken]) for name in SCHEDULES]


def simulated_s(schedule: Schedule) -> float:
    """The makespan on paper, with the nominal durations and messages that take no time."""
    share = schedule.n_stages // schedule.n_ranks
    nominal = {Kind.FORWARD: FORWARD_S / share, Kind.BACKWARD: BACKWARD_S / share}

    def duration(action: Action) -> float:
        return nominal[action.kind]

    return simulate(schedule, duration).makespan


def _rank(rank: int, ranks: int, rounds: int) -> dict[str, Any]:
    return {name: _schedule(name, rank, ranks, rounds) for name in SCHEDULES}


def _schedule(name: str, rank: int, ranks: int, rounds: int) -> dict[str, Any]:
    schedule = schedule_of(name, ranks, MICROBATCHES)
    share = schedule.n_stages // ranks
    modules: dict[int, nn.Module] = {stage: Sleeper(share) for stage in schedule.stages_of(rank)}
    draws = torch.randn(MICROBATCHES, 2, 8, 8, generator=torch.Generator().manual_seed(1))
    case = Case(schedule, rank, modules, [(x, y) for x, y in draws], nn.functional.mse_loss)
    steps = variants(case)
    for step in steps.values():
        step()  # the first step learns shapes and opens connections
    clear = lambda: clear_gradients(modules.values())  # noqa: E731
    return take_turns(steps, clear, Turns(rounds, _LIMIT_S))


def _row(name: str, ranks: int, taken: list[dict[str, Any]]) -> Row:
    seconds = step_seconds(taken, batch=1)
    paper = simulated_s(schedule_of(name, ranks, MICROBATCHES))
    on_paper = [paper] * len(seconds["ours"])
    targets = [Target("ours/simulated", ratio(seconds["ours"], on_paper), 1.12)]
    if "torch" in seconds:
        targets.append(Target("ours/torch", ratio(seconds["ours"], seconds["torch"]), 1.0))
    milliseconds = {variant: median(values) * 1e3 for variant, values in seconds.items()}
    bare = ratio(seconds["bare"], on_paper)
    return Row(
        name, {"simulated": paper * 1e3, **milliseconds}, targets, f"bare/simulated {bare:.3f}; {conditions(taken)}"
    )
