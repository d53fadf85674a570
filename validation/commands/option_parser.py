"""The parser of a command line: what it refuses is an error like any other, and a value may begin with a minus."""

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

_NEGATIVE = re.compile(r"-(\d|\.\d|inf|nan)", re.IGNORECASE)


class UsageError(ValueError):
    """A command line that is none of ours."""


class OptionParser(argparse.ArgumentParser):
    """As argparse's, but it raises ``UsageError`` where that would print and exit."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Say where help is."""
        raise UsageError(f"{message}; see {self.prog} --help")


def joined(words: Sequence[str]) -> list[str]:
    """``--split -1,9`` as ``--split=-1,9``: argparse would take the value for another option."""
    return list(_joined(words))


def _joined(words: Sequence[str]) -> Iterator[str]:
    option = ""
    for word in words:
        if option and _NEGATIVE.match(word):
            yield f"{option}={word}"
            option = ""
            continue
        if option:
            yield option
        option = word if word.startswith("--") and len(word) > 2 and "=" not in word else ""
        if not option:
            yield word
    if option:
        yield option
