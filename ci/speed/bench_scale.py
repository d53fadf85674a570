"""Part d: building, checking and simulating large schedules; the cost of an action should not grow with their number.

As a script, ``bench_scale.py NAME VIRTUAL SIZE`` measures one point and prints it as JSON: a process of its own for
each, so that its peak memory is this point's and nothing else's.
"""

import json
import math
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from bench_table import Row, Target

from pipeproof.pipeline import build, lower, program_laws, simulate
from pipeproof.pipeline.laws import check

SIZES = (64, 128, 256, 512, 1024)
SCHEDULES = (("1f1b", 1), ("interleaved", 2))
SECONDS, GIGABYTES = 60.0, 6.0
_GROWTH = 1.1  # the most that the exponent of the cost should be
_FEWEST = 100_000  # actions: below, what a process does once still counts


def measure(*, ranks: int, rounds: int) -> list[Row]:
    """Seconds by step for P = M up to ``ranks``, all laws under all transport models: the quickest of ``rounds``."""
    sizes = [size for size in SIZES if size <= ranks] or [ranks]
    return [row for name, virtual in SCHEDULES for row in _curve(name, virtual, sizes, rounds)]


def exponent(points: Sequence[tuple[float, float]]) -> float:
    """The slope of log cost over log size, by least squares: 1 for a cost that grows linearly."""
    xs, ys = zip(*((math.log(size), math.log(cost)) for size, cost in points), strict=True)
    middle_x, middle_y = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    slope = math.fsum((x - middle_x) * (y - middle_y) for x, y in zip(xs, ys, strict=True))
    return slope / math.fsum((x - middle_x) ** 2 for x in xs)


def _curve(name: str, virtual: int, sizes: Sequence[int], rounds: int) -> list[Row]:
    points = [min((_child(name, virtual, size) for _ in range(rounds)), key=_total) for size in sizes]
    rows = [_row(f"{name} P=M={size} V={virtual}", point) for size, point in zip(sizes, points, strict=True)]
    large = [(point["actions"], _total(point)) for point in points if point["actions"] >= _FEWEST]
    if len(large) < 2:
        return rows
    growth = Target("exponent of seconds over actions", exponent(large), _GROWTH)
    return [*rows, Row(f"{name} growth", {}, [growth], f"from {large[0][0]:,} to {large[-1][0]:,} actions")]


def _total(point: dict[str, Any]) -> float:
    return sum(point["seconds"].values())


def _row(name: str, point: dict[str, Any]) -> Row:
    total = _total(point)
    medians = {"total s": total, "us/action": 1e6 * total / point["actions"], "peak GB": point["gigabytes"]}
    targets = [Target("seconds", total, SECONDS), Target("GB", point["gigabytes"], GIGABYTES)]
    note = f"{point['actions']:,} actions, {point['entries']:,} with messages"
    return Row(name, point["seconds"] | medians, targets, note)


def _child(name: str, virtual: int, size: int) -> dict[str, Any]:
    command = [sys.executable, __file__, name, str(virtual), str(size)]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def _point(name: str, virtual: int, size: int) -> dict[str, Any]:
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
    counts = {"actions": len(schedule.columns), "entries": len(program.columns)}
    return {"seconds": seconds, "gigabytes": peak_bytes() / (1 << 30), **counts}


def peak_bytes() -> int:
    """The most memory that this process ever had. Linux's getrusage would count what its parent had at the fork."""
    if sys.platform == "linux":
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS says it in bytes


if __name__ == "__main__":
    print(json.dumps(_point(sys.argv[1], *map(int, sys.argv[2:]))))
