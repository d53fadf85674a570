"""Drawings: what they show."""

import pytest

from pipeproof.pipeline.schedule import ScheduleError, schedule_from_csv
from pipeproof.pipeline.schedules import FAMILIES, build, virtuals
from pipeproof.pipeline.text_grid import draw, grid
from pipeproof.pipeline.timeline import simulate
from tests.support.golden import golden


@pytest.mark.parametrize("name", FAMILIES)
def test_golden(name: str) -> None:
    golden(grid(build(name, ranks=4, microbatches=8, virtual=virtuals(name, looped=2))))


def test_v_min_waits_where_ranks_are_a_multiple_of_three() -> None:
    golden(grid(build("v-min", ranks=3, microbatches=4)))


def test_a_forward_is_one_cell_and_a_backward_two() -> None:
    golden(grid(schedule_from_csv("0F0,0B0\n1F0,1I0,1W0")))


def test_one_rank_is_never_idle() -> None:
    golden(grid(build("1f1b", ranks=1, microbatches=2)))


def test_wide_cells_and_two_digit_ranks_stay_in_columns() -> None:
    drawn = grid(build("gpipe", ranks=11, microbatches=11))
    golden(drawn)
    golden(grid(build("gpipe", ranks=10, microbatches=1)))
    assert len({len(line) for line in drawn.splitlines()}) == 1


def test_latency_shows_as_idle_cells() -> None:
    timeline = simulate(schedule_from_csv("0F0,0B0\n1F0,1B0"), latency=1.0)
    golden(draw(timeline))


def test_parts_of_a_unit_are_not_rounded_away() -> None:
    timeline = simulate(schedule_from_csv("0F0,0B0\n1F0,1B0"), latency=0.5)
    with pytest.raises(ScheduleError, match=r"^cannot draw: 1F0 runs from 1\.5 to 2\.5, which are not whole units$"):
        draw(timeline)


def test_a_contradictory_schedule_says_who_waits() -> None:
    with pytest.raises(ScheduleError, match="rank 0 waits at 0B0"):
        grid(schedule_from_csv("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0"))
