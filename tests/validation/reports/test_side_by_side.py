"""Two schedules compare as the same work, whatever their numbers of stages are."""

import pytest

from pipeproof.pipeline import Times, build
from pipeproof.reports.side_by_side import SideBySide
from tests.support.golden import golden


def beside(one: str, other: str, **shape: int) -> SideBySide:
    built = (build(name, **{"ranks": 4, "microbatches": 8}, virtual=shape.get(name)) for name in (one, other))
    return SideBySide.of(list(built), Times())


def test_stages_of_another_size_take_their_share() -> None:
    both = beside("1f1b", "interleaved", interleaved=3)
    assert both.parts == 12
    busy = [timeline.busy[0] for timeline in both.timelines.values()]
    assert busy == [8 * 9, 8 * 9]
    golden(both.text())
    golden(both.unit)


def test_numbers_stand_side_by_side_with_their_difference() -> None:
    golden(beside("1f1b", "gpipe").text())


def test_a_schedule_beside_itself_differs_in_nothing() -> None:
    both = beside("zb-v", "zb-v")
    assert list(both.timelines) == ["zb-v", "zb-v again"]
    assert [line.split()[-1] for line in both.text().splitlines()[1:-1]] == ["0"] * 5
    assert list(both.traces) == list(both.timelines)


@pytest.mark.parametrize("other", ["zb-v", "v-min", "dualpipev", "looped-bfs"])
def test_the_work_is_the_same_on_every_rank(other: str) -> None:
    both = beside("zb-h1", other)
    first, second = (set(timeline.busy) for timeline in both.timelines.values())
    assert first == second
