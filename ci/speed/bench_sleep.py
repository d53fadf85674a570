"""Part b: wall time over simulated time, with stages that sleep instead of computing, so that ranks need no cores."""

from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from bench_order import chain, out_of_order
from bench_ranks import Turns, conditions, on_ranks, step_seconds, take_turns
from bench_sleeper import UNIT_S, Sleeper, Sleeps, Watched, assert_lasted, excess, halves
from bench_table import Row, Target, ratio
from bench_variants import Case, clear_gradients, disagreement, pipeline_of, schedule_of, variants
from torch import nn

from pipeproof.pipeline import Schedule, Times, simulate
from pipeproof.pipeline.schedules import FAMILIES

MICROBATCHES = 32
_LIMIT_S = 400.0
_AGREE = 1e-5  # fp32, up to the order of accumulation
Taken = list[dict[str, Any]]


def measure(*, ranks: int, rounds: int, whole_s: float = UNIT_S) -> list[Row]:
    """A row per schedule: milliseconds per step, ours over the simulated time and over torch; then their order.

    ``whole_s`` is how long each of F, I and W lasts on a rank, a share of it in each of the rank's stages. A round
    is one step of every variant of every schedule, so that all are measured under the same conditions.
    """
    schedules = {name: schedule_of(name, ranks, MICROBATCHES) for name in FAMILIES}
    beyond = excess()
    for unit in {unit_s(schedule, whole_s) for schedule in schedules.values()}:
        assert_lasted(halves(Sleeps(unit, unit).shortened(beyond)), unit)
    taken = on_ranks(ranks, _rank, ranks, rounds, beyond, whole_s)
    seconds = step_seconds([rank["turns"] for rank in taken], batch=1)
    paper = {name: simulated_s(schedule, whole_s) for name, schedule in schedules.items()}
    wall = {name: median(seconds[f"{name} ours"]) for name in FAMILIES}
    latency = latency_s(schedules["naive"], wall["naive"], _lasted(taken, "naive"))
    really = {name: as_measured_s(schedule, _lasted(taken, name), latency) for name, schedule in schedules.items()}
    return [
        *(_row(name, seconds, paper[name], really[name], _lasted(taken, name)) for name in FAMILIES),
        order("order", wall, paper, f"; {conditions([rank['turns'] for rank in taken])}"),
        order("order, as measured", wall, really, f"; {latency * 1e3:.2f} ms a message"),
        _against_1f1b(seconds, paper),
    ]


def unit_s(schedule: Schedule, whole_s: float = UNIT_S) -> float:
    """How long each of a stage's F, I and W is to last: a rank's stages share its time."""
    return whole_s * schedule.n_ranks / schedule.n_stages


def simulated_s(schedule: Schedule, whole_s: float = UNIT_S) -> float:
    """The makespan on paper, with the nominal durations and messages that take no time."""
    unit = unit_s(schedule, whole_s)
    return simulate(schedule, Times(unit, unit, unit)).makespan


def as_measured_s(schedule: Schedule, lasted: Mapping[str, float], latency_s: float = 0.0) -> float:
    """The makespan on paper, with actions that last as long as they did on the ranks, and messages that take time."""
    return simulate(schedule, lambda action: lasted[action.kind.value], latency=latency_s).makespan


def latency_s(naive: Schedule, wall_s: float, lasted: Mapping[str, float]) -> float:
    """What a message takes: in the naive schedule nothing else is left to explain a step, all are on its one path."""
    return max(0.0, wall_s - as_measured_s(naive, lasted)) / simulate(naive).messages


def _rank(rank: int, ranks: int, rounds: int, beyond: Sleeps, whole_s: float) -> dict[str, Any]:
    steps, modules, lasted = {}, [], {}
    for name in FAMILIES:
        case = _case(name, rank, ranks, beyond, whole_s)
        own = variants(case)
        differs = disagreement(case.modules.values(), own)  # the first step also learns shapes and opens connections
        assert max(differs.values()) < _AGREE, f"{name}: gradients differ from ours by {differs}: nothing to compare"
        lasted[name] = _watched(case, unit_s(case.schedule, whole_s))
        steps |= {f"{name} {variant}": step for variant, step in own.items()}
        modules += case.modules.values()
    return {"turns": take_turns(steps, lambda: clear_gradients(modules), Turns(rounds, _LIMIT_S)), "lasted": lasted}


def _case(name: str, rank: int, ranks: int, beyond: Sleeps, whole_s: float) -> Case:
    schedule = schedule_of(name, ranks, MICROBATCHES)
    unit = unit_s(schedule, whole_s)
    sleeps = Sleeps(unit, unit).shortened(beyond)
    modules: dict[int, nn.Module] = {stage: Sleeper(sleeps) for stage in schedule.stages_of(rank)}
    draws = torch.randn(MICROBATCHES, 2, 8, 8, generator=torch.Generator().manual_seed(1))
    # The first stage is to have an input gradient too, or its I would have nothing to do and sleep in W, as torch's
    # does whatever its input: there the first stage's whole backward is its W.
    return Case(schedule, rank, modules, [(x.requires_grad_(), y) for x, y in draws], nn.functional.mse_loss)


def _watched(case: Case, unit: float) -> dict[str, float]:
    """One step of ours, watched: each kind of action sleeps as long as it should, in the half where it belongs."""
    seconds: dict[str, list[float]] = {}
    pipeline = pipeline_of(case)
    watched = pipeline.wrap(lambda parts: replace(parts, stages=tuple(Watched(s, seconds) for s in parts.stages)))
    watched.accumulate(case.microbatches)
    assert not pipeline.undeferred, f"sleeps that belong to W came early: {pipeline.undeferred}"
    lasted = {kind: median(taken) for kind, taken in seconds.items()}
    assert_lasted(lasted, unit)
    return lasted


def order(name: str, wall: Mapping[str, float], paper: Mapping[str, float], under: str) -> Row:
    """Whether wall times rank as the simulated ones do, and which pairs do not."""
    wrong = out_of_order(wall, paper)
    pairs = (
        f"{less} before {more} ({paper[more] / paper[less] - 1:.1%}, but {wall[more] / wall[less] - 1:.1%})"
        for less, more in wrong
    )
    agree = f"no, not {', '.join(pairs)}" if wrong else "yes"
    note = f"ranks agree: {agree}; simulated {chain(paper)}; wall {chain(wall)}{under}"
    return Row(name, {}, [Target("pairs out of order", len(wrong), 0)], note)


def _lasted(taken: Taken, name: str) -> dict[str, float]:
    kinds = taken[0]["lasted"][name]
    return {kind: median(rank["lasted"][name][kind] for rank in taken) for kind in kinds}


def _row(
    name: str, seconds: Mapping[str, list[float]], paper: float, really: float, lasted: Mapping[str, float]
) -> Row:
    own = {key.removeprefix(f"{name} "): values for key, values in seconds.items() if key.startswith(f"{name} ")}
    targets = [Target("ours/simulated", median(own["ours"]) / paper, 1.12)]
    if "torch" in own:
        targets.append(Target("ours/torch", ratio(own["ours"], own["torch"]), 1.0))
    actions = ", ".join(f"{kind} {value * 1e3:.2f}" for kind, value in lasted.items())
    note = f"ours/simulated {median(own['ours']) / really:.3f} as measured: {actions} ms"
    return Row(name, {"simulated": paper * 1e3} | {v: median(values) * 1e3 for v, values in own.items()}, targets, note)


def _against_1f1b(seconds: Mapping[str, list[float]], paper: Mapping[str, float]) -> Row:
    won = ratio(seconds["zb-h1 ours"], seconds["1f1b ours"])
    torchs = ratio(seconds["zb-h1 torch"], seconds["1f1b torch"])
    note = f"simulated {paper['zb-h1'] / paper['1f1b']:.3f}; torch's {torchs:.3f}"
    return Row("zb-h1 to 1f1b", {}, [Target("ours", won, 1.0)], note)
