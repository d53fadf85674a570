"""What is made of times: medians, spreads, and what cannot be told from noise."""

import math

import pytest

from pipeproof.own.timings import Ratio, Timing, Turn


def timed(*rounds: float) -> Timing:
    return Timing("a.json", "", "", rounds)


def test_a_step_takes_as_long_as_its_slowest_rank_and_a_round_is_a_median() -> None:
    found = timed().after([Turn((1.0, 5.0, 2.0), (0.5,)), Turn((3.0, 1.0, 1.0), ())])
    assert found.rounds == (3.0,)
    assert (found.losses, found.strange) == (1, ())


def test_a_turn_that_counts_memory_is_no_round() -> None:
    found = timed().after([Turn((), (1.0,), 7), Turn((), (), 9)]).after([Turn((2.0,), ()), Turn((1.0,), ())])
    assert (found.bytes, found.rounds) == ((7, 9), (2.0,))


def test_what_is_not_finite_is_kept() -> None:
    found = timed().after([Turn((1.0,), (1.0, math.nan, math.inf))])
    assert (found.losses, len(found.strange)) == (3, 2)


def test_a_spread_is_from_the_fastest_round_to_the_slowest() -> None:
    assert timed(1.0, 2.0, 2.0, 2.5, 4.0).spread == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("first", "other", "noise"),
    [
        ((1.0, 1.1, 1.2), (1.1, 1.2, 1.15), True),  # 1 lies within the range of ratios
        ((1.0, 1.0, 1.0), (1.01, 1.05, 1.2), True),  # all beyond it, but further from each other
        ((1.01, 1.05, 1.2), (1.0, 1.0, 1.0), True),
        ((1.0, 1.1, 1.2), (2.0, 2.2, 2.4), False),
        ((2.0, 2.2, 2.4), (1.0, 1.1, 1.2), False),
        ((1.0, 1.0, 1.0), (1.0, 2.0, 9.0), True),
        ((1.0, 1.0, 1.0), (1.0, 1.0, 1.0), True),
        ((1.0, 1.0), (2.0, 2.0), True),
    ],
)
def test_a_ratio_as_near_to_one_as_rounds_are_to_each_other_is_noise(
    first: tuple[float, ...], other: tuple[float, ...], noise: bool
) -> None:
    assert Ratio(timed(*first), timed(*other)).noise is noise


def test_what_slows_both_in_one_round_is_neither_in_the_ratio_nor_noise() -> None:
    ratio = Ratio(timed(1.0, 10.0, 1.0), timed(2.0, 20.0, 2.0))
    assert (ratio.value, ratio.noise) == (2.0, False)
