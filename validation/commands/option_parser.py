"""The parser of a command line: what it refuses is an error like any other, and a value may begin with a minus.

Numbers are as options take them: argparse adds the option's name to what is said here of the value.
"""

import argparse
import math
import re
from argparse import ArgumentTypeError
from functools import partial
from typing import Any, NoReturn

from pipeproof.pipeline.sizes import MOST_SECONDS, is_number, number_wanted

_NEGATIVE = re.compile(r"-(\d|\.\d|inf|nan)", re.IGNORECASE)


class UsageError(ValueError):
    """A command line that is none of ours."""


class OptionParser(argparse.ArgumentParser):
    """As argparse's, but it raises ``UsageError`` where that would print and exit, and knows ``-1,9`` for a value."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        self._negative_number_matcher = _NEGATIVE

    def error(self, message: str) -> NoReturn:
        """Say where help is."""
        raise UsageError(f"{message}; see {self.prog} --help")


def number(word: str, *, zero: bool = False, text: str = "") -> float:
    """A finite number above 0, or ``zero``; ``text`` is what ``word`` is a part of."""
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not is_number(value, zero=zero):
        inside = f" in {text!r}" if text not in ("", word) else ""
        raise ArgumentTypeError(f"{word!r}{inside}: expected {number_wanted(zero=zero)}")
    return value


def numbers(text: str, *, zero: bool = False) -> tuple[float, ...]:
    """``1,2.5``: finite numbers above 0, or ``zero``."""
    return tuple(number(word, zero=zero, text=text) for word in text.split(","))


share, shares = partial(number, zero=True), partial(numbers, zero=True)


def three_numbers(text: str) -> tuple[float, ...]:
    """``1,1,2``: T_F, T_I and T_W."""
    found = numbers(text)
    if len(found) != 3:
        raise ArgumentTypeError(f"{text!r} has {len(found)} numbers: expected three, T_F, T_I and T_W, e.g. 1,1,1")
    return found


def seconds(text: str) -> float:
    """A bound of time."""
    found = number(text)
    if found > MOST_SECONDS:
        raise ArgumentTypeError(f"{text!r} is too long: expected at most {MOST_SECONDS:g} seconds")
    return found
