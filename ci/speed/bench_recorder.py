"""Part f: what it costs a step to record its boundary tensors and every addition to its gradients."""

from statistics import median
from typing import Any

import torch.distributed as dist
from bench_ranks import Turns, conditions, on_ranks, own_place, step_seconds, take_turns
from bench_table import Row, Target, ratio

from pipeproof.core.observe.recorder import Recorder
from pipeproof.own.case import Case
from pipeproof.own.observe import assemble
from pipeproof.reference.data import Shapes, microbatches
from pipeproof.worlds.accelerator import CPU
from pipeproof.worlds.worker import RankContext

# Microbatches as small as those of a validation, and as long as the model's context admits.
SUBJECTS = {
    "gpt": ("gpt", Shapes()),
    "gpt 8 x 64": ("gpt", Shapes(rows=8, tokens=64)),
    "mlp": ("mlp", Shapes()),
}
SCHEDULES = ("1f1b", "zb-h1")
MICROBATCHES = 8
LAYERS = 4  # of a stage
_LIMIT_S = 20.0  # per row
_MOST = 1.10


def measure(*, ranks: int, rounds: int, device: str = CPU, limit_s: float = _LIMIT_S) -> list[Row]:
    """A row per schedule and subject: milliseconds per step, recorded and not, and the one over the other."""
    taken = on_ranks(ranks, _rank, ranks, Turns(rounds, limit_s), device=device)
    return [_row(name, [rank[name] for rank in taken]) for name in taken[0]]


def _rank(rank: int, ranks: int, turns: Turns) -> dict[str, Any]:
    return {
        f"{schedule} {name}": _steps(
            Case(schedule, ranks, 1, MICROBATCHES, (LAYERS,) * ranks, model=model), shapes, turns
        )
        for schedule in SCHEDULES
        for name, (model, shapes) in SUBJECTS.items()
    }


def _steps(case: Case, shapes: Shapes, turns: Turns) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None, "ranks have a group"
    _, schedule = assemble(RankContext(dist.get_rank(), case.ranks, own_place(), group), case)
    recorder = Recorder()
    recorded = schedule.wrap(recorder.wrap)
    batches = microbatches(case.model, count=case.microbatches, shapes=shapes, seed=case.seed)
    pairs = [(batch.inputs, batch.target) for batch in (batch.to(own_place()) for batch in batches)]
    steps = {
        "plain": lambda: schedule.train_step(pairs, max_norm=1.0),
        "recorded": lambda: recorded.train_step(pairs, max_norm=1.0),
    }

    def taken() -> None:
        """The recording is taken after its step, untimed; from then on the modules are watched no more."""
        recorder.take()

    return take_turns(steps, taken, turns)


def _row(name: str, taken: list[dict[str, Any]]) -> Row:
    seconds = step_seconds(taken, 1)
    milliseconds = {variant: median(values) * 1e3 for variant, values in seconds.items()}
    target = Target("recorded/plain", ratio(seconds["recorded"], seconds["plain"]), _MOST)
    return Row(name, milliseconds, [target], conditions(taken))
