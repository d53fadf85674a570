"""Ranks must collect the same tests, in whatever order."""

from validation.worlds.pytest_torchrun import Collected, difference


def test_order_is_no_difference() -> None:
    assert difference([Collected(["a", "b"], {}), Collected(["b", "a"], {})]) == ""


def test_an_error_of_all_ranks_is_no_difference() -> None:
    assert difference([Collected([], {"x.py": "on rank 0"}), Collected([], {"x.py": "on rank 1"})]) == ""


def test_every_rank_that_lacks_a_test_is_named() -> None:
    collected = [Collected(["a", "b"], {}), Collected(["b"], {}), Collected(["a", "b", *"cdefgh"], {})]
    assert difference(collected).splitlines() == [
        "the ranks collected different tests",
        "rank 0 lacks c, d, e, f, g and 1 more",
        "rank 1 lacks a, c, d, e, f and 2 more",
    ]


def test_an_error_of_one_rank_is_told() -> None:
    collected = [Collected(["a"], {}), Collected([], {"x.py": "ImportError: no"})]
    assert difference(collected).splitlines()[1:] == [
        "rank 1 lacks a",
        "rank 1 cannot collect x.py:",
        "    ImportError: no",
    ]
