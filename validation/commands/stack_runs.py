"""Validating stacks of primitives, a line each."""

from collections.abc import Sequence
from functools import partial

from pipeproof.cases.primitives.stacked import validated
from pipeproof.cases.primitives.stacks import Stack
from pipeproof.commands.campaign import CaseRun, Setting, Then, run_all
from pipeproof.commands.outputs import Opened
from pipeproof.core.verdict import Verdict
from pipeproof.foreign import WhiteBox
from pipeproof.reports.columns import Column, row
from pipeproof.reports.table import OUTCOME, compared, outcome
from pipeproof.worlds.world import World

_FIGURES = (
    Column("schedule", 11, drop=7),
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
    longest = max(len(str(stack)) for stack in stacks)
    columns = (Column("stack", longest + 1), *_FIGURES)  # which is never cut: it tells one from another
    return run_all([_run_of(stack, columns) for stack in stacks], setting, columns=columns)


def _run_of(stack: Stack, columns: Sequence[Column]) -> CaseRun:
    def judge(world: World, files: Opened) -> tuple[Verdict, Then]:
        return validated(stack, WhiteBox(world)), lambda: None

    return CaseRun(str(stack), stack.ranks, judge, partial(_row, stack, columns))


def _row(stack: Stack, columns: Sequence[Column], verdict: Verdict, width: int | None) -> str:
    cells = [str(stack), stack.schedule if stack.has_pipeline else "", str(stack.ranks), str(stack.microbatches)]
    counts = compared(verdict, "loss", "gradient", "replicas", "shards")
    return row(columns, [*cells, *counts, *outcome(verdict)], width)
