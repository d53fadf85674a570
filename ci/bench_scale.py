"""Part d: building, checking and simulating large schedules, one shot each; the cost per action should not grow."""

import resource
import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

from bench_table import Row, Target

from pipeline import build, lower, program_laws, simulate
from pipeline.laws import check

SIZES = (256, 512, 1024)
SECONDS, GIGABYTES = 60.0, 6.0


def measure(*, ranks: int, rounds: int) -> list[Row]:
    """Seconds by step for P = M up to ``ranks``, with all laws under all transport models; ``rounds`` is one here."""
    sizes = [size for size in SIZES if size <= ranks] or [ranks]
    del rounds
    return [_row(name, virtual, size) for name, virtual in (("1f1b", 1), ("interleaved", 2)) for size in sizes]


def _row(name: str, virtual: int, size: int) -> Row:
    seconds: dict[str, float] = {}

    def timed(what: str, step: Callable[[], Any]) -> Any:
        began = perf_counter()
        result = step()
        seconds[what] = perf_counter() - began
        return result

    schedule = timed("build", lambda: build(name, ranks=size, microbatches=size, virtual=virtual))
    timed("check", lambda: check(schedule))
    timed("simulate", lambda: simulate(schedule))
    program = timed("lower", lambda: lower(schedule))
    timed("transports", lambda: program_laws.check(program))
    total, entries = sum(seconds.values()), len(program.columns)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << (30 if sys.platform == "darwin" else 20))
    return Row(
        f"{name} P=M={size} V={virtual}",
        seconds | {"total": total, "us/action": 1e6 * total / len(schedule.columns), "GB so far": peak},
        [Target("seconds", total, SECONDS), Target("GB", peak, GIGABYTES)],
        f"{len(schedule.columns):,} actions, {entries:,} with messages",
    )
