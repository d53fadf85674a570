"""Part a: what a runtime costs per action, measured with stages that compute almost nothing."""

from statistics import median
from typing import Any

import torch
from bench_ranks import Turns, conditions, on_ranks, own_place, step_seconds, take_turns
from bench_table import Row, Target, ratio
from bench_variants import Case, clear_gradients, disagreement, schedule_of, variants
from torch import nn

from pipeproof.worlds.accelerator import CPU

SCHEDULES = ("naive", "gpipe", "1f1b", "interleaved")
HIDDEN = 64
ROWS = 32  # of a microbatch
MICROBATCHES = 32
_BATCH = 3  # steps per turn
_LIMIT_S = 20.0  # per schedule
_AGREE = 1e-5  # fp32, up to the order of accumulation


def measure(*, ranks: int, rounds: int, device: str = CPU, limit_s: float = _LIMIT_S) -> list[Row]:
    """A row per schedule: milliseconds per step, and ours over bare and over torch. ``device`` as a world has it."""
    taken = on_ranks(ranks, _rank, ranks, Turns(rounds, limit_s, _BATCH), device=device)
    return [_row(name, ranks, [rank[name] for rank in taken]) for name in SCHEDULES]


def _rank(rank: int, ranks: int, turns: Turns) -> dict[str, Any]:
    return {name: _schedule(name, rank, ranks, turns) for name in SCHEDULES}


def _schedule(name: str, rank: int, ranks: int, turns: Turns) -> dict[str, Any]:
    schedule = schedule_of(name, ranks, MICROBATCHES)
    modules = _modules(schedule.stages_of(rank), schedule.n_stages, ranks)
    generator = torch.Generator().manual_seed(1)
    draws = torch.randn(MICROBATCHES, 2, ROWS, HIDDEN, generator=generator).to(own_place())
    case = Case(schedule, rank, modules, [(x, y) for x, y in draws], nn.functional.mse_loss)
    steps = variants(case)
    differs = disagreement(modules.values(), steps)
    assert max(differs.values()) < _AGREE, f"{name}: gradients differ from ours by {differs}: nothing to compare"
    clear = lambda: clear_gradients(modules.values())  # noqa: E731
    return take_turns(steps, clear, turns) | {"differs": differs}


def _modules(own: tuple[int, ...], n_stages: int, ranks: int) -> dict[int, nn.Module]:
    """The model has 2 P halves, whatever the schedule, so that all rows do the same work."""
    torch.manual_seed(0)
    halves = [nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU()) for _ in range(2 * ranks)]
    per_stage = len(halves) // n_stages
    return {stage: nn.Sequential(*halves[stage * per_stage : (stage + 1) * per_stage]).to(own_place()) for stage in own}


def _row(name: str, ranks: int, taken: list[dict[str, Any]]) -> Row:
    seconds = step_seconds(taken, _BATCH)
    actions = len(schedule_of(name, ranks, MICROBATCHES).ranks[0])
    targets = []
    if "bare" in seconds:
        targets.append(Target("ours/bare", ratio(seconds["ours"], seconds["bare"]), 1.15))
    if "torch" in seconds:
        most = 0.5 if name == "interleaved" else 0.8
        targets.append(Target("ours/torch", ratio(seconds["ours"], seconds["torch"]), most))
    milliseconds = {variant: median(values) * 1e3 for variant, values in seconds.items()}
    differs = max(value for rank in taken for value in rank["differs"].values())
    note = (
        f"{milliseconds['ours'] * 1e3 / actions:.0f} us/action; gradients differ by {differs:.0e}; {conditions(taken)}"
    )
    return Row(name, milliseconds, targets, note)
