"""What ranks hold, and when they hold the most."""

from pipeproof.pipeline.memory import memory_held, peaks_of
from pipeproof.pipeline.schedule import schedule_from_csv

SPLIT = schedule_from_csv("0F0,0F1,0I0,0W0,0B1\n1F0,1F1,1I0,1I1,1W0,1W1").columns


def test_an_activation_is_held_from_forward_to_backward() -> None:
    assert memory_held(SPLIT).tolist() == [1, 2, 2, 2, 1, 1, 2, 2, 2, 2, 1]
    assert peaks_of(SPLIT) == ((2, 1), (2, 1))


def test_a_part_of_it_from_input_to_weight_backward() -> None:
    assert memory_held(SPLIT, weight_memory=0.25).tolist() == [1, 2, 2, 1.25, 1, 1, 2, 2, 1.25, 0.5, 0.25]
    assert peaks_of(SPLIT, weight_memory=1.5) == ((2.5, 3), (3, 4)), "an input backward may leave more than it frees"


def test_stages_differ_in_size() -> None:
    assert [peak.value for peak in peaks_of(SPLIT, sizes=(3, 0.5))] == [6, 1]


def test_a_rank_without_actions_holds_nothing() -> None:
    assert peaks_of(SPLIT.take(SPLIT.rank == 1)) == ((0, -1), (2, 1))
