"""Validating stacks of primitives, a line each."""

from collections.abc import Sequence
from functools import partial

from pipeproof.cases.primitives.stacked import validated
from pipeproof.cases.primitives.stacks import Stack
from pipeproof.commands.campaign import Run, Setting, Then, run_all
from pipeproof.commands.outputs import Opened
from pipeproof.foreign import WhiteBox
from pipeproof.judging.verdict import Verdict
from pipeproof.reports.columns import Column, Layout
from pipeproof.reports.table import OUTCOME, compared, outcome
from pipeproof.worlds.world import World

COLUMNS = (
    Column("stack", 24, least=8, gap=0),
    Column("schedule", 11, drop=7, gap=2),
    Column("ranks", 5, right=True, drop=4),
    Column("M", 3, right=True, drop=6),
    Column("losses", 6, right=True, drop=8),
    Column("params", 6, right=True, drop=5),
    Column("copies", 6, right=True, drop=9),
    Column("shards", 6, right=True, drop=10),
    *OUTCOME,
)


def run_stacks(stacks: Sequence[Stack], setting: Setting) -> int:
    """Validate each; returns the exit status."""
    return run_all(list(map(_run_of, stacks)), setting, columns=COLUMNS)


def _run_of(stack: Stack) -> Run:
    def judge(world: World, files: Opened) -> tuple[Verdict, Then]:
        return validated(stack, WhiteBox(world)), lambda: None

    return Run(str(stack), stack.ranks, judge, partial(_row, stack))


def _row(stack: Stack, verdict: Verdict, width: int | None) -> str:
    cells = [str(stack), stack.schedule if stack.has_pipeline else "", str(stack.ranks), str(stack.microbatches)]
    counts = compared(verdict, "loss", "gradient", "replicas", "shards")
    return Layout.of(COLUMNS, width).row([*cells, *counts, *outcome(verdict)])
