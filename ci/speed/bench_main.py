"""``ci/bench``: speed claims, measured side by side in one run. Always ends with status 0 unless something broke."""

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import bench_cases
import bench_check
import bench_diagnosis
import bench_held
import bench_overhead
import bench_proof
import bench_recorder
import bench_scale
import bench_simulated
import bench_sleep
import bench_whitebox
import torch
from bench_ranks import machine_seconds
from bench_table import Row, table


@dataclass(frozen=True)
class Part:
    """One part of the bench: what it says over its table, and how it is run."""

    title: str
    unit: str
    measure: Callable[..., list[Row]]
    ranks: int
    rounds: int


PARTS = {
    "a": Part("overhead per action, almost no compute", "ms per step", bench_overhead.measure, 2, 40),
    "b": Part("wall time over simulated time, sleeping stages", "ms per step", bench_sleep.measure, 4, 11),
    "b2": Part(
        "the same, twice as slow: 5 ms for every action of a rank's two stages",
        "ms per step",
        partial(bench_sleep.measure, whole_s=10e-3),
        4,
        7,
    ),
    "c": Part("fuzz cases against a world spawned per case", "cases per second", bench_cases.measure, 4, 3),
    "d": Part("building, checking, simulating up to P = M = ranks", "seconds", bench_scale.measure, 1024, 1),
    "e": Part("memory held between I and W", "MB", bench_held.measure, 1, 1),
    "f": Part("what recording boundary tensors costs", "ms per step", bench_recorder.measure, 2, 40),
    "g": Part("what validating a foreign step adds to it", "seconds", bench_whitebox.measure, 4, 9),
    "h": Part("finding the cause of one failure", "seconds", bench_diagnosis.measure, 4, 3),
    "i": Part("what check_step adds to a step", "ms per step", bench_check.measure, 2, 20),
    "j": Part("fuzz cases on simulated ranks, and on real ones", "cases per second", bench_simulated.measure, 2, 10),
    "k": Part("proving a plan of a 405B model's size", "seconds", bench_proof.measure, 16, 1),
}


def main() -> None:
    """Run the parts that were asked for and print a table for each."""
    options = _options()
    machine = {"torch": torch.__version__, "Python": platform.python_version(), "cores": os.cpu_count()}
    results: dict[str, object] = {"machine": machine}
    print(", ".join(f"{what} {value}" for what, value in machine.items()))
    for name in options.parts or PARTS:
        part = PARTS[name]
        ranks, rounds = options.ranks or part.ranks, options.rounds or part.rounds
        began, busy = time.perf_counter(), machine_seconds()
        rows = part.measure(ranks=ranks, rounds=rounds)
        took = time.perf_counter() - began
        load = _load(busy, machine_seconds())
        print(f"\n({name}) {part.title}: {part.unit}, medians of {rounds} rounds, {ranks} ranks, {took:.0f} s; {load}")
        print(table(rows), flush=True)
        results[name] = {"ranks": ranks, "rounds": rounds, "machine": load, "rows": [row.as_json() for row in rows]}
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=2)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ci/bench",
        description=__doc__,
        epilog="\n".join(
            [
                "parts:",
                *(f"  {name:2}  {part.title} ({part.unit})" for name, part in PARTS.items()),
                "",
                "Exit status: 0 measured; 2 bad usage.",
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="|".join(PARTS), help="the parts to run (default: all)")
    defaults = ", ".join(f"{part.ranks} for {name}" for name, part in PARTS.items())
    parser.add_argument("--ranks", type=int, help=f"how many ranks (default: {defaults})")
    parser.add_argument("--rounds", type=int, help="how often each variant takes its turn")
    parser.add_argument("--json", metavar="FILE", help="also write the numbers to FILE")
    options = parser.parse_args()
    unknown = [part for part in options.parts if part not in PARTS]
    if unknown:
        parser.error(f"no part {unknown[0]!r}: parts are {', '.join(PARTS)}")
    return options


def _load(before: Sequence[float], after: Sequence[float]) -> str:
    """How busy the machine was meanwhile, and how much of it other guests of its host took."""
    user, system, steal, idle = (b - a for a, b in zip(before, after, strict=True))
    total = user + system + steal + idle
    return f"machine {(user + system) / total:.0%} busy, {steal / total:.1%} stolen" if total else "load unknown"


if __name__ == "__main__":
    main()
