"""Clocks of several machines brought together."""

from pipeproof.pipeline import clocks


def test_ranks_of_one_machine_share_its_clock() -> None:
    assert clocks.shifts([(7.0, 100.0), (7.0, 100.1), (7.0, 99.9)]) == [0.0, 0.0, 0.0]


def test_ranks_of_another_machine_move_together_by_what_its_first_rank_reads() -> None:
    assert clocks.shifts([(7.0, 100.0), (8.0, 40.0), (7.0, 100.5), (8.0, 40.5)]) == [0.0, 60.0, 0.0, 60.0]


def test_a_reading_is_of_this_machine_and_goes_forward() -> None:
    (machine, now), (again, later) = clocks.reading(), clocks.reading()
    assert machine == again
    assert later >= now
