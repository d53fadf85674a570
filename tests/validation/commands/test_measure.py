"""Timing on real ranks: what a trace of a step holds, and what is made of it."""

import shlex
from argparse import Namespace
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from pipeproof.commands.measure import describe, show_measured
from pipeproof.commands.outputs import Outputs
from pipeproof.own.case import Case
from pipeproof.own.measured import Measured, measure
from pipeproof.pipeline import Kind, lower
from pipeproof.pipeline.action import COMPUTE, SENDS
from pipeproof.pipeline.program import deliveries
from pipeproof.pipeline.trace import Trace
from pipeproof.worlds.rank_report import Ending, RankFailed, RankReport
from pipeproof.worlds.world import World
from tests.pipeline.test_trace import TRACE
from tests.support.golden import golden
from tests.support.typed import Typed

CASE = Case("zb-h1", 2, 2, 5, (1, 1, 1, 1))


def test_a_measured_step_has_every_action_in_order(world: World) -> None:
    measured = measure(CASE, world, steps=3)
    assert len(measured.steps) == 3
    for step in measured.steps:
        assert step.began == 0 < step.makespan
        assert step.schedule == CASE.built
        for rank, (spans, actions) in enumerate(zip(step.spans, lower(CASE.built).ranks, strict=True)):
            assert [s.action for s in spans if s.action.kind in COMPUTE] == list(CASE.built.ranks[rank])
            assert sorted(s.action for s in spans) == sorted(actions)
            assert all(one.ended == pytest.approx(other.began, abs=1e-6) for one, other in pairwise(spans))
            assert all(0 <= span.waited <= span.ended - span.began + 1e-6 for span in spans)
            assert all(span.waited == 0 for span in spans if span.action.kind in {*SENDS, Kind.BACKWARD_WEIGHT})
        for delivery in deliveries(step.schedule):  # no message is used before it is sent
            assert step.by_action[delivery.send].began < step.by_action[delivery.user].worked_from


def test_a_typical_step_is_shown_beside_the_simulation() -> None:
    def lasting(seconds: float) -> Trace:
        *most, last = TRACE.spans[1]
        return replace(TRACE, spans=(TRACE.spans[0], (*most, last._replace(ended=TRACE.began + seconds))))

    measured = Measured((lasting(9), lasting(6.5), lasting(7)))
    assert measured.typical.makespan == 7
    _, *rows, last = (line.split() for line in describe(measured).splitlines()[:6])
    assert [row[0] for row in rows] == ["0", "simulated", "1", "simulated"]
    assert rows[0][:4] == ["0", "measured", "7000.0", "ms"]
    assert last[:4] == ["makespan:", "7000.0", "ms", "measured,"]


def test_ranks_that_fail_leave_no_file(tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> Measured:
        raise RankFailed([RankReport(0, Ending.FINISHED), RankReport(1, Ending.DIED, "ended with status 7")])

    monkeypatch.setattr("pipeproof.commands.measure.measure", fail)
    with Outputs.open("show", {"trace": str(tmp_path / "x.json")}) as outputs:
        assert show_measured(CASE, Namespace(steps=1, world="real", outputs=outputs)) == 3
    golden(typed.said())
    assert list(tmp_path.iterdir()) == []


def test_simulated_ranks_have_clocks_of_their_own(typed: Typed) -> None:
    run = ["show", "1f1b", "--ranks", "3", "--microbatches", "4", "--run", "--steps", "1", "--model", "mlp"]
    out = typed([*run, "--world", "simulated", "--times", "1,1,1", "--latency", "0.5"])
    assert "share" not in out, "no processor is shared"


@pytest.mark.parametrize(
    "line",
    [
        "--run --times 1,1,1",
        "--run --latency 1",
        "--world simulated",
        "--run --world simulated --latency -1",
    ],
)
def test_virtual_time_that_makes_no_sense(line: str, typed: Typed) -> None:
    typed.refused(["show", "1f1b", "--ranks", "2", "--microbatches", "2", *shlex.split(line)])
