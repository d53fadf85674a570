"""What a panel says: titles with sizes, bubbles and memory, cells with their whole truth, and what breaks a law."""

import pytest

from pipeproof.pipeline import Action, build
from pipeproof.pipeline.costs import trace_of
from pipeproof.pipeline.laws import Violation, violations
from pipeproof.pipeline.program import read_csv
from pipeproof.pipeline.schedule import Schedule
from pipeproof.pipeline.schedules import FAMILIES, virtuals
from pipeproof.pipeline.timeline import Times, simulate
from pipeproof.reports.panel import Cell, Panel, draw_trace, in_slots
from tests.pipeline.test_trace import TRACE
from tests.support.golden import golden

# Two things are wrong on rank 1: 1B0 comes before 1F0, and 1F1 is there twice.
BROKEN = "0F0,0F1,0B0,0B1\n1F1,1B0,1F0,1F1,1B1\n"


def cell(panel: Panel, name: str) -> Cell:
    return next(each for each in panel.cells if each.action == Action.parse(name))


def broken() -> Panel:
    schedule = read_csv(BROKEN, name="mine.csv")
    assert isinstance(schedule, Schedule)
    return in_slots(schedule.name, schedule, schedule.ranks, violations(schedule))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_heading_has_the_numbers_of_the_simulation(name: str) -> None:
    schedule = build(name, ranks=4, microbatches=8, virtual=virtuals(name, looped=2))
    timeline = simulate(schedule, Times(1, 1.5, 0.5))
    panel = draw_trace(name, trace_of(timeline))
    golden("\n".join([panel.title, *panel.facts]))


def test_measured_time_is_said_in_milliseconds_and_a_wait_is_left_open() -> None:
    panel = draw_trace("measured", TRACE.from_zero())
    golden("\n".join([*panel.facts[:2], panel.axis, cell(panel, "1F0").says]), exact=True)
    assert (cell(panel, "1F0").left, cell(panel, "1F0").right) == (3, 6)
    row = TRACE.spans[1]
    nothing = TRACE.__class__(TRACE.schedule, (TRACE.spans[0], (row[0], row[1]._replace(waited=5))))
    assert len(draw_trace("nothing", nothing).cells) == len(panel.cells) - 1


def test_fused_actions_are_pairs_that_name_each_other() -> None:
    schedule = build("dualpipev", ranks=4, microbatches=8)
    panel = draw_trace("dualpipev", trace_of(simulate(schedule)))
    assert len(panel.pairs) == len(schedule.overlaps) > 0
    for one, other in panel.pairs:
        assert one.rank == other.rank
        assert one.right == other.left
        assert one.says.endswith(f"as one with {other.action}")
        assert other.says.endswith(f"as one with {one.action}")
        assert {one, other} <= set(panel.cells)


def test_stages_of_a_rank_have_places() -> None:
    panel = draw_trace("zb-v", trace_of(simulate(build("zb-v", ranks=2, microbatches=2))))
    assert (panel.places, panel.most) == ({0: 0, 1: 0, 2: 1, 3: 1}, 2)


def test_what_breaks_a_law_is_marked() -> None:
    panel = broken()
    red = [(each.rank, each.left, str(each.action)) for each in panel.cells if each.wrong]
    assert red == [(1, 0, "1F1"), (1, 1, "1B0"), (1, 2, "1F0"), (1, 3, "1F1")]
    assert panel.wrong
    golden("\n".join([panel.title, *panel.facts, cell(panel, "1B0").says, panel.axis]))
    long = Violation("acyclic", "round and round " * 99)
    assert len(in_slots("x", panel.schedule, panel.schedule.ranks, [long]).facts[0]) < 310
    found = violations(panel.schedule) * 5
    assert in_slots("x", panel.schedule, panel.schedule.ranks, found).facts[-1] == f"and {len(found) - 6} more"
