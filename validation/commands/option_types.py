"""Numbers as options take them: argparse adds the option's name to what is said here of the value."""

import math
from argparse import ArgumentTypeError

from pipeline.sizes import MOST_SECONDS, is_number, number_wanted


def number(text: str) -> float:
    """A finite number above 0."""
    return _number(text, text)


def share(text: str) -> float:
    """A finite number, 0 or above."""
    return _number(text, text, zero=True)


def numbers(text: str) -> tuple[float, ...]:
    """``1,2.5``: finite numbers above 0."""
    return tuple(_number(word, text) for word in text.split(","))


def shares(text: str) -> tuple[float, ...]:
    """``0,2.5``: finite numbers, 0 or above."""
    return tuple(_number(word, text, zero=True) for word in text.split(","))


def three_numbers(text: str) -> tuple[float, float, float]:
    """``1,1,2``: T_F, T_I and T_W."""
    found = numbers(text)
    if len(found) != 3:
        raise ArgumentTypeError(f"{text!r} has {len(found)} numbers: expected three, T_F, T_I and T_W, e.g. 1,1,1")
    f, i, w = found
    return f, i, w


def seconds(text: str) -> float:
    """A bound of time."""
    found = number(text)
    if found > MOST_SECONDS:
        raise ArgumentTypeError(f"{text!r} is too long: expected at most {MOST_SECONDS:g} seconds")
    return found


def _number(word: str, text: str, *, zero: bool = False) -> float:
    """What ``word`` of ``text`` says."""
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not is_number(value, zero=zero):
        inside = "" if word == text else f" in {text!r}"
        raise ArgumentTypeError(f"{word!r}{inside}: expected {number_wanted(zero=zero)}")
    return value
