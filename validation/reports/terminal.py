"""Terminal output of commands: lines and progress. Only rank 0 of a launcher speaks."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, TypeVar

from rich.console import Console
from rich.text import Text

from pipeproof.core.verdict import Verdict
from pipeproof.reports.columns import columns
from pipeproof.worlds.launcher import reports

T = TypeVar("T")

_STYLES = {"pass": "green", "fail": "bold red", "unknown": "bold yellow"}
_STYLES |= {"error": "bold red", "hang": "bold red", "same": "green", "different": "bold yellow"}


@dataclass(frozen=True)
class Manner:
    """A command's manner of speaking. ``quiet``: no details and no progress; ``verbose``: everything.

    ``aside``: on standard error, since a file takes standard output.
    """

    color: Literal["auto", "always", "never"] = "auto"
    quiet: bool = False
    verbose: bool = False
    aside: bool = False


_PLAIN = Manner()
_manner: ContextVar[Manner] = ContextVar("_manner", default=_PLAIN)


@contextmanager
def speaking(manner: Manner) -> Iterator[None]:
    """Give every ``Terminal`` made in the block this manner."""
    token = _manner.set(manner)
    try:
        yield
    finally:
        _manner.reset(token)


class Terminal:
    """Standard output for results, standard error for progress, shown only on a terminal."""

    def __init__(self) -> None:
        self.manner = _manner.get()
        color = self.manner.color
        plain = color == "never" or (color == "auto" and bool(os.environ.get("NO_COLOR")))
        self._out, self._err = (
            Console(
                stderr=stderr,
                quiet=not reports(),
                soft_wrap=True,
                highlight=False,
                color_system=None if plain else "auto",
                force_terminal=True if color == "always" else None,
                no_color=False if color == "always" else None,
            )
            for stderr in (self.manner.aside, True)
        )

    @property
    def width(self) -> int:
        """Number of columns: the terminal's, or else as COLUMNS says, or else 100."""
        return self._out.width if self._out.file.isatty() else columns()

    def say(self, text: str, outcome: str = "") -> None:
        """Print one or more lines; the word ``outcome`` is coloured."""
        line = Text(text)
        if outcome:
            line.highlight_regex(rf"\b({outcome}|{outcome.upper()})\b", _STYLES[outcome])
        self._out.print(line)

    def detail(self, text: str, outcome: str = "") -> None:
        """Print a detail, unless quiet: for readers who want more than faults and the result."""
        if not self.manner.quiet:
            self.say(text, outcome)

    def tell(self, text: str, outcome: str = "", *, passed: bool) -> None:
        """Print a detail if it ``passed``, and always otherwise."""
        (self.detail if passed else self.say)(text, outcome)

    def verdict(self, verdict: Verdict) -> None:
        """Print a verdict's screen, or all details on request."""
        self.say(verdict.details if self.manner.verbose else str(verdict), verdict.word)

    def in_turn(self, runs: Sequence[tuple[str, Callable[[], T]]], *, start: str = "", of: int = 0) -> Iterator[T]:
        """Run each of ``runs`` in turn, and yield its result; its title and number show meanwhile.

        ``start``: text before the number. ``of``: their total, if more than these.
        """
        for number, (title, run) in enumerate(runs, start=1):
            with self.progress(f"{start}{number} of {of or len(runs)}: {title}"):
                found = run()
            yield found

    @contextmanager
    def progress(self, text: str) -> Iterator[Callable[[str], None]]:
        """Show a line during the block; call the yielded function to replace it."""
        # Without a terminal rich would still write an empty string, which fails on a full disk.
        if self.manner.quiet or not self._err.file.isatty():
            yield lambda text: None
            return
        with self._err.status(text) as status:
            yield status.update
