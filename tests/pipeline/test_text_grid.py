"""Drawings: what they show."""

import pytest

from pipeproof.pipeline.schedule import ScheduleError, schedule_from_csv
from pipeproof.pipeline.schedules import FAMILIES, build, virtuals
from pipeproof.pipeline.text_grid import draw, grid
from pipeproof.pipeline.timeline import simulate
from tests.support.golden import golden

DRAWN = {
    **{name: build(name, ranks=4, microbatches=8, virtual=virtuals(name, looped=2)) for name in FAMILIES},
    "v-min waits where ranks are a multiple of three": build("v-min", ranks=3, microbatches=4),
    "a forward is one cell and a backward two": schedule_from_csv("0F0,0B0\n1F0,1I0,1W0"),
    "one rank is never idle": build("1f1b", ranks=1, microbatches=2),
    "two-digit ranks": build("gpipe", ranks=10, microbatches=1),
}


@pytest.mark.parametrize("name", DRAWN)
def test_golden(name: str) -> None:
    golden(grid(DRAWN[name]))


def test_wide_cells_and_two_digit_ranks_stay_in_columns() -> None:
    drawn = grid(build("gpipe", ranks=11, microbatches=11))
    golden(drawn)
    assert len({len(line) for line in drawn.splitlines()}) == 1


def test_latency_shows_as_idle_cells_and_never_rounded() -> None:
    schedule = schedule_from_csv("0F0,0B0\n1F0,1B0")
    golden(draw(simulate(schedule, latency=1.0)))
    with pytest.raises(ScheduleError, match=r"^cannot draw: 1F0 runs from 1\.5 to 2\.5, which are not whole units$"):
        draw(simulate(schedule, latency=0.5))
