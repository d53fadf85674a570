"""The bounds of sizes and numbers, and that what is proven stays within them."""

import math
from collections.abc import Callable

import pytest

from pipeproof.pipeline.schedule import ScheduleError
from pipeproof.pipeline.sizes import (
    MOST_ACTIONS,
    MOST_MICROBATCHES,
    MOST_RANKS,
    check_count,
    check_measure,
    digits,
    some,
    three_digits,
)


def test_what_is_within_bounds_comes_back() -> None:
    assert check_count("ranks", 4, most=4) == 4
    assert check_measure("memory", 1e15) == 1e15
    assert check_measure("share", 0.0, zero=True) == 0.0


@pytest.mark.parametrize(
    ("value", "words"), [(0, "ranks is 0: expected at least 1"), (5, "ranks is 5: expected at most 4")]
)
def test_a_count_beyond_its_bounds_is_refused(value: int, words: str) -> None:
    with pytest.raises(ScheduleError, match=f"^{words}$"):
        check_count("ranks", value, most=4)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e16])
def test_a_number_beyond_its_bounds_is_refused(value: float) -> None:
    with pytest.raises(ScheduleError, match=f"^memory is {value:g}: expected a number above 0".replace("+", "[+]")):
        check_measure("memory", value)


def test_a_plan_of_1024_ranks_and_microbatches_is_within_bounds() -> None:
    assert min(MOST_RANKS, MOST_MICROBATCHES) >= 1024
    assert 1024 * 1024 * 4 * 3 <= MOST_ACTIONS, "four stages on a rank, F, I and W"


def test_one_is_no_plural() -> None:
    observed = [some(1, "rank"), some(2, "stage"), some(1, "microbatch"), some(3, "microbatch")]
    assert observed == ["1 rank", "2 stages", "1 microbatch", "3 microbatches"]


THREE = {0.0: "0", 0.01234: "0.0123", 27.51: "27.5", 45.0: "45", 99.97: "100", 1234.5: "1,234"}
FACTORS = {0.5: "0.5", 1.0: "1", 1.00002: "1.00002", -1 / 3: "-0.3333", 1e6: "1e+06"}


@pytest.mark.parametrize(("of", "texts"), [(three_digits, THREE), (digits, FACTORS)])
def test_only_1_is_told_as_1(of: Callable[[float], str], texts: dict[float, str]) -> None:
    """And three digits are never a power of ten."""
    assert {value: of(value) for value in texts} == texts
