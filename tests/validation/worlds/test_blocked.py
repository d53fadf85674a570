"""Ranks that nothing outside them would free."""

from validation.worlds.blocked import unfreed


def test_a_circle_and_what_waits_for_it() -> None:
    assert unfreed({0: [1], 1: [2], 2: [1], 3: [2]}) == [(1, 2)]


def test_one_that_waits_for_nobody() -> None:
    assert unfreed({0: [1], 2: [0]}) == [(1,)]


def test_whichever_message_it_is() -> None:
    assert unfreed({0: [1, 2], 1: [0], 2: [0]}) == [(0, 1, 2)]
    assert unfreed({0: [1, 2], 1: [0]}) == [(2,)]


def test_several_circles() -> None:
    assert unfreed({0: [1], 1: [0], 2: [3], 3: [2]}) == [(0, 1), (2, 3)]
