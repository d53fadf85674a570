"""The bound of a wait, as code and options say it."""

import math
from argparse import ArgumentTypeError

import pytest

from pipeproof.worlds.timeout import parse_seconds, seconds
from tests.support.golden import golden


@pytest.mark.parametrize("text", ["0", "-1", "inf", "nan", "1e9", "soon", ""])
def test_what_bounds_no_wait_is_refused_in_the_same_words(text: str) -> None:
    with pytest.raises(ArgumentTypeError) as refused:
        parse_seconds(text)
    golden(str(refused.value))
    number = float(text) if text not in ("soon", "") else math.nan
    with pytest.raises(ValueError, match=r": expected seconds above 0, and at most 1e\+06"):
        seconds(number)


def test_what_does_is_what_it_says() -> None:
    assert [parse_seconds("1e6"), parse_seconds("0.5"), seconds(3)] == [1e6, 0.5, 3]
