"""The parser of a command line: what it refuses is an error like any other, and a value may begin with a minus.

Numbers are as options take them: argparse adds the option's name to what is said here of the value.
"""

import argparse
import math
import re
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable
from functools import partial
from textwrap import fill
from typing import Any, NoReturn

from pipeproof.pipeline.schedules import list_known, nearest
from pipeproof.pipeline.sizes import is_number, number_wanted
from pipeproof.reports.columns import columns

_NEGATIVE = re.compile(r"-(\d|\.\d|inf|nan)", re.IGNORECASE)

Known = Iterable[str] | Callable[[], Iterable[str]]  # names, or what finds them when they are asked for


class UsageError(ValueError):
    """A command line that is none of ours, or that asks for what cannot be here."""


class _Help(argparse.HelpFormatter):
    """As argparse's, but defaults are said, and what is to be typed stays in one piece where it has a hyphen."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=columns() - 2)

    def _get_help_string(self, action: argparse.Action) -> str:
        said = action.help or ""
        none = isinstance(action.default, bool | None) or action.default in ("", (), [], argparse.SUPPRESS)
        return said if none or "default" in said else f"{said} (default %(default)s)"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        whole = " ".join(text.split())
        return fill(whole, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


class _HelpAll(argparse.Action):
    """As ``--help``, with the options that few need."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        assert isinstance(parser, OptionParser), "which alone has it"
        parser._print_message(parser.format_help(every=True), sys.stdout)
        parser.exit()


class OptionParser(argparse.ArgumentParser):
    """As argparse's, but it raises ``UsageError`` where that would print and exit, and knows ``-1,9`` for a value."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False, formatter_class=_Help, add_help=False)
        self._negative_number_matcher = _NEGATIVE
        self.add_argument("-h", "--help", action="help", help="say what there is, and how it is used")
        self.add_argument(
            "--help-all",
            action=_HelpAll,
            nargs=0,
            default=argparse.SUPPRESS,
            help="the same, with the options that few need",
        )

    @property
    def further(self) -> str:
        """How many options are rare, in a sentence; empty where none is."""
        count = sum(bool(vars(one).get("rare")) for one in self._actions)
        return f"--help-all: {count} more options." if count else ""

    def format_help(self, *, every: bool = False) -> str:
        """All of it, or all but what is ``rare``."""
        made = self._get_formatter()
        named = [one for one in self._actions if one.required or not one.option_strings]
        made.add_usage(self.usage, [*named, argparse.Action([], "options", nargs="?")], [])
        made.add_text(self.description)
        for group in self._action_groups:
            made.start_section(group.title)
            made.add_text(group.description)
            made.add_arguments([one for one in group._group_actions if every or not vars(one).get("rare")])
            made.end_section()
        made.add_text(self.epilog)
        return made.format_help()

    def error(self, message: str) -> NoReturn:
        """Say where help is."""
        raise UsageError(f"{message}; see {self.prog} --help")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            hint = list_known(str(value), list(map(str, action.choices)))
            raise argparse.ArgumentError(action, f"unknown {value!r}: {hint}")


class CommandParser(OptionParser):
    """The parser of one command: it knows what was said of it, and what it does not know it refuses itself."""

    def parse_known_args(self, *arguments: Any, **more: Any) -> tuple[Any, list[str]]:
        """As argparse's, with ``prog``, and ``given``: the options that are named. Raises ``UsageError``."""
        options, rest = super().parse_known_args(*arguments, **more)
        if rest and not rest[0].startswith("-"):
            self.error(f"unexpected argument {rest[0]!r}")
        if rest:
            option = rest[0].partition("=")[0]
            hint = nearest(option, list(self._option_string_actions))
            self.error(f"unknown option {option}{': ' * bool(hint)}{hint.rstrip(' ')}")
        options.prog = self.prog
        options.given = frozenset(word.partition("=")[0] for word in arguments[0] if word.startswith("--"))
        return options, rest


def add(
    parser: argparse._ActionsContainer,
    name: str,
    letter: str | None,
    says: str,
    kind: Callable[[str], Any] = str,
    *,
    known: Known = (),
    **more: Any,
) -> None:
    """An option or a positional argument: ``letter`` stands for its value, which ``kind`` makes of a word.

    A shell that completes it offers the ``known`` names, also behind a comma; ``more`` is as argparse has it, but for
    ``rare``: few need it, and ``--help`` leaves it out.
    """
    rare = more.pop("rare", False)

    def completer(prefix: str = "", **_: object) -> list[str]:
        before = prefix[: prefix.rfind(",") + 1]
        return [before + name for name in (known() if callable(known) else known)]

    action = parser.add_argument(name, type=kind, metavar=letter, help=says, **more)
    vars(action)["rare"] = rare
    if known:
        vars(action)["completer"] = completer


def add_flag(parser: argparse._ActionsContainer, *names: str, says: str, **more: Any) -> None:
    """An option without a value."""
    rare = more.pop("rare", False)
    vars(parser.add_argument(*names, action="store_true", help=says, **more))["rare"] = rare


def whole(word: str) -> int:
    """A whole number."""
    try:
        if word.isascii():
            return int(word)
    except ValueError:
        pass
    raise ArgumentTypeError(f"{word!r}: expected a whole number")


def whole_numbers(text: str) -> tuple[int, ...]:
    """``0,15``: whole numbers."""
    return tuple(whole(word) for word in text.split(","))


def refuse_unused(options: argparse.Namespace, names: Iterable[str], why: str, *, where: bool = True) -> None:
    """Raise ``UsageError`` where the command line names one of these options, which do nothing here."""
    for name in names if where else ():
        if name in options.given:
            raise UsageError(f"{name} has no effect {why}: leave it out; see {options.prog} --help")


def number(word: str, *, zero: bool = False, text: str = "") -> float:
    """A finite number above 0, or ``zero``; ``text`` is what ``word`` is a part of."""
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not is_number(value, zero=zero):
        inside = f" in {text!r}" if text not in ("", word) else ""
        unit = ", without a unit" if re.fullmatch(r"\s*[\d.]+\s*[A-Za-z/]+\s*", word) else ""
        raise ArgumentTypeError(f"{word!r}{inside}: expected {number_wanted(zero=zero)}{unit}")
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
