"""What is made of times: medians, spreads, and what cannot be told from noise."""

import math

import pytest

from pipeproof.own.timings import Timing, Turn


def timed(*rounds: float) -> Timing:
    return Timing("a.json", "", "", rounds)


@pytest.mark.parametrize(
    ("turns", "found"),
    [
        # A step takes as long as its slowest rank, and a round is a median.
        ([[Turn((1.0, 5.0, 2.0), (0.5,)), Turn((3.0, 1.0, 1.0), ())]], ((3.0,), (0, 0), 1, 0)),
        # A turn that counts memory is no round.
        ([[Turn((), (1.0,), 7), Turn((), (), 9)], [Turn((2.0,), ()), Turn((1.0,), ())]], ((2.0,), (7, 9), 1, 0)),
        # What is not finite is kept.
        ([[Turn((1.0,), (1.0, math.nan, math.inf))]], ((1.0,), (0,), 3, 2)),
    ],
)
def test_what_turns_come_to(turns: list[list[Turn]], found: tuple[object, ...]) -> None:
    timing = timed()
    for turn in turns:
        timing = timing.after(turn)
    assert (timing.rounds, timing.bytes or (0,) * len(turns[0]), timing.losses, len(timing.strange)) == found


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
    assert timed(*other).ratio_to(timed(*first)).noise is noise


def test_what_slows_both_in_one_round_is_neither_in_the_ratio_nor_noise() -> None:
    ratio = timed(2.0, 20.0, 2.0).ratio_to(timed(1.0, 10.0, 1.0))
    assert (ratio.value, ratio.noise) == (2.0, False)
