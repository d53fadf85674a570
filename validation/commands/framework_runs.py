"""Replaying a case of a framework: a line, and all about it."""

from functools import partial

from pipeproof.cases.frameworks.engines import engine, judged
from pipeproof.cases.frameworks.framework_case import FrameworkCase
from pipeproof.commands.campaign import Run, Setting, Then, run_all
from pipeproof.commands.outputs import Opened
from pipeproof.judging.verdict import Verdict
from pipeproof.reports.columns import Column, Layout
from pipeproof.reports.table import OUTCOME, compared, outcome
from pipeproof.worlds.world import World

_COLUMNS = (
    Column("framework", 10, gap=0),
    Column("schedule", 13, drop=7, gap=2),
    Column("P", 2, right=True, drop=4),
    Column("V", 2, right=True, drop=8),
    Column("M", 3, right=True, drop=5),
    Column("DP", 2, right=True, drop=6),
    Column("layers", 6, right=True, drop=9),
    Column("losses", 6, right=True, drop=10),
    Column("params", 6, right=True, drop=3),
    *OUTCOME,
)


def replay_framework(case: FrameworkCase, setting: Setting) -> int:
    """Run it again; returns the exit status. Raises what its adapter raises where the framework is not installed."""
    engine(case.framework)

    def judge(world: World, files: Opened) -> tuple[Verdict, Then]:
        return judged(case, world), lambda: None

    run = Run(str(case), case.processes, judge, partial(_row, case))
    return run_all([run], setting, columns=_COLUMNS)


def _row(case: FrameworkCase, verdict: Verdict, width: int | None) -> str:
    one = case.layout
    sizes = map(str, (one.pp, one.vp, case.microbatches, one.dp, one.layers))
    cells = [case.framework, case.schedule, *sizes, *compared(verdict, "loss", "gradient"), *outcome(verdict)]
    return Layout.of(_COLUMNS, width).row(cells)
