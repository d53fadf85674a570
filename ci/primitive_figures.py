"""Validate every primitive alone, seed by seed, and keep the figures. `ci/primitives --help` says how."""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from pipeproof.core.measured import versions
from pipeproof.core.verdict import Verdict
from pipeproof.whitebox import WhiteBox
from pipeproof.wings.primitives.primitive import PRIMITIVES, Figures
from pipeproof.wings.primitives.stacked import validate_stack
from pipeproof.wings.primitives.stacks import Stack, smallest_stack
from pipeproof.worlds.world import World

FILE = Path(__file__).parent.parent / "validation/wings/primitives/figures.json"


def main() -> int:
    """Measure, and write; the exit status is 1 where anything did not pass, and then nothing is written."""
    parser = argparse.ArgumentParser(
        description="Validate every primitive alone with seeds 0 to N - 1, and keep the figures.",
        epilog="Exit status: 0 all pass, and the figures are kept; 1 something did not pass; 2 bad usage.",
    )
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="how many (default 20)")
    seeds = parser.parse_args().seeds
    if seeds < 1:
        parser.error(f"--seeds {seeds}: expected at least 1")
    found = {}
    with World(device="cpu", silent=True, most_groups=100) as world:
        for name in PRIMITIVES:
            found[name] = figures_of(name, seeds, world)
            print(f"{name:<8} {found[name].passed} of {seeds} pass, worst error {found[name].worst:.2g}", flush=True)
    if any(one.passed < seeds for one in found.values()):
        return 1
    partial = FILE.with_suffix(".new")
    partial.write_text(json.dumps({name: asdict(one) for name, one in found.items()}, indent=2) + "\n", "utf-8")
    os.replace(partial, FILE)
    return 0


def figures_of(name: str, seeds: int, world: World) -> Figures:
    """What a table says of the primitive ``name``."""
    stack = Stack.parse(smallest_stack(name))
    return summed_up(stack.ranks, [validate_stack(replace(stack, seed=seed), WhiteBox(world)) for seed in range(seeds)])


def summed_up(ranks: int, verdicts: Sequence[Verdict]) -> Figures:
    """Of one primitive, ``verdicts`` on all seeds."""
    worst = max((verdict.law("gradient") for verdict in verdicts if verdict.laws), key=lambda law: law.worst)
    passed = sum(verdict.outcome == "pass" for verdict in verdicts)
    return Figures(ranks, len(verdicts), passed, worst.checked, worst.worst, worst.floor, versions()["torch"])


if __name__ == "__main__":
    raise SystemExit(main())
