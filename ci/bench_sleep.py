"""Part b: wall time over simulated time, with stages that sleep instead of computing, so that ranks need no cores."""

from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from bench_order import chain, out_of_order
from bench_ranks import Turns, conditions, on_ranks, step_seconds, take_turns
from bench_sleeper import UNIT_S, Sleeper, Sleeps, Watched, assert_lasted, halves
from bench_table import Row, Target, ratio
from bench_variants import Case, clear_gradients, disagreement, pipeline_of, schedule_of, variants
from torch import nn

from pipeline import Schedule, Times, simulate
from pipeline.schedules import FAMILIES

MICROBATCHES = 32
_LIMIT_S = 330.0
_AGREE = 1e-5  # fp32, up to the order of accumulation
Taken = list[dict[str, Any]]


def measure(*, ranks: int, rounds: int) -> list[Row]:
    """A row per schedule: milliseconds per step, ours over the simulated time and over torch; then their order.

    A round is one step of every variant of every schedule, so that all are measured under the same conditions.
    """
    schedules = {name: schedule_of(name, ranks, MICROBATCHES) for name in FAMILIES}
    sleeps = {unit: Sleeps.lasting(unit) for unit in {*map(unit_s, schedules.values())}}
    for unit, those in sleeps.items():
        assert_lasted(halves(those), unit)
    taken = on_ranks(ranks, _rank, ranks, rounds, sleeps)
    seconds = step_seconds([rank["turns"] for rank in taken], batch=1)
    paper = {name: simulated_s(schedule) for name, schedule in schedules.items()}
    rows = [_row(schedule, seconds, _slept(taken, name)) for name, schedule in schedules.items()]
    wall = {name: median(seconds[f"{name} ours"]) for name in FAMILIES}
    return [*rows, _order(wall, paper, conditions([rank["turns"] for rank in taken])), _against_1f1b(seconds, paper)]


def unit_s(schedule: Schedule) -> float:
    """How long each of a stage's F, I and W sleeps: a rank's stages share its time."""
    return UNIT_S * schedule.n_ranks / schedule.n_stages


def simulated_s(schedule: Schedule) -> float:
    """The makespan on paper, with the nominal durations and messages that take no time."""
    unit = unit_s(schedule)
    return simulate(schedule, Times(unit, unit, unit)).makespan


def _rank(rank: int, ranks: int, rounds: int, sleeps: Mapping[float, Sleeps]) -> dict[str, Any]:
    steps, modules, slept = {}, [], {}
    for name in FAMILIES:
        case = _case(name, rank, ranks, sleeps)
        own = variants(case)
        differs = disagreement(case.modules.values(), own)  # the first step also learns shapes and opens connections
        assert max(differs.values()) < _AGREE, f"{name}: gradients differ from ours by {differs}: nothing to compare"
        slept[name] = _watched(case)
        steps |= {f"{name} {variant}": step for variant, step in own.items()}
        modules += case.modules.values()
    return {"turns": take_turns(steps, lambda: clear_gradients(modules), Turns(rounds, _LIMIT_S)), "slept": slept}


def _case(name: str, rank: int, ranks: int, sleeps: Mapping[float, Sleeps]) -> Case:
    schedule = schedule_of(name, ranks, MICROBATCHES)
    those = sleeps[unit_s(schedule)]
    modules: dict[int, nn.Module] = {stage: Sleeper(those) for stage in schedule.stages_of(rank)}
    draws = torch.randn(MICROBATCHES, 2, 8, 8, generator=torch.Generator().manual_seed(1))
    # The first stage is to have an input gradient too, or its I would have nothing to do and sleep in W.
    return Case(schedule, rank, modules, [(x.requires_grad_(), y) for x, y in draws], nn.functional.mse_loss)


def _watched(case: Case) -> dict[str, float]:
    """One step of ours, watched: each kind of action sleeps as long as it should, in the half where it belongs."""
    seconds: dict[str, list[float]] = {}
    pipeline = pipeline_of(case)
    watched = pipeline.wrapped(lambda parts: replace(parts, stages=tuple(Watched(s, seconds) for s in parts.stages)))
    watched.accumulate(case.microbatches)
    assert not pipeline.undeferred, f"sleeps that belong to W came early: {pipeline.undeferred}"
    lasted = {kind: median(taken) for kind, taken in seconds.items()}
    assert_lasted(lasted, unit_s(case.schedule))
    return lasted


def _slept(taken: Taken, name: str) -> dict[str, float]:
    kinds = taken[0]["slept"][name]
    return {kind: median(rank["slept"][name][kind] for rank in taken) for kind in kinds}


def _row(schedule: Schedule, seconds: Mapping[str, list[float]], slept: Mapping[str, float]) -> Row:
    name, paper = schedule.name, simulated_s(schedule)
    own = {key.removeprefix(f"{name} "): values for key, values in seconds.items() if key.startswith(f"{name} ")}
    targets = [Target("ours/simulated", median(own["ours"]) / paper, 1.12)]
    if "torch" in own:
        targets.append(Target("ours/torch", ratio(own["ours"], own["torch"]), 1.0))
    really = simulate(schedule, lambda action: slept[action.kind.value]).makespan
    actions = ", ".join(f"{kind} {value * 1e3:.2f}" for kind, value in slept.items())
    note = f"ours/simulated {median(own['ours']) / really:.3f} with measured durations: {actions} ms"
    return Row(name, {"simulated": paper * 1e3} | {v: median(values) * 1e3 for v, values in own.items()}, targets, note)


def _order(wall: Mapping[str, float], paper: Mapping[str, float], under: str) -> Row:
    wrong = out_of_order(wall, paper)
    pairs = ", ".join(f"{less} before {more}" for less, more in wrong)
    agree = f"no, for {pairs}" if wrong else "yes"
    note = f"ranks agree: {agree}; simulated {chain(paper)}; wall {chain(wall)}; {under}"
    return Row("order", {}, [Target("pairs out of order", len(wrong), 0)], note)


def _against_1f1b(seconds: Mapping[str, list[float]], paper: Mapping[str, float]) -> Row:
    won = ratio(seconds["zb-h1 ours"], seconds["1f1b ours"])
    torchs = ratio(seconds["zb-h1 torch"], seconds["1f1b torch"])
    note = f"simulated {paper['zb-h1'] / paper['1f1b']:.3f}; torch's {torchs:.3f}"
    return Row("zb-h1 to 1f1b", {}, [Target("ours", won, 1.0)], note)
