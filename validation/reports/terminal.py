"""What a person sees while commands run: lines and progress. Only rank 0 of a launcher speaks."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, TypeVar

from rich.console import Console
from rich.text import Text

from pipeproof.core.verdict import Verdict
from pipeproof.worlds.launcher import reports

T = TypeVar("T")

_STYLES = {"pass": "green", "fail": "bold red", "unknown": "bold yellow"}
_STYLES |= {"error": "bold red", "hang": "bold red", "same": "green", "different": "bold yellow"}


@dataclass(frozen=True)
class Manner:
    """How a command speaks. ``quiet``: no details and no progress; ``verbose``: what else there is to say.

    ``aside``: on standard error, as a file that it writes has standard output.
    """

    color: Literal["auto", "always", "never"] = "auto"
    quiet: bool = False
    verbose: bool = False
    aside: bool = False

    def console(self, *, stderr: bool) -> Console:
        """A console of rich in this manner."""
        plain = self.color == "never" or (self.color == "auto" and bool(os.environ.get("NO_COLOR")))
        system: Literal["auto"] | None = None if plain else "auto"
        forced = True if self.color == "always" else None
        return Console(
            stderr=stderr,
            quiet=not reports(),
            soft_wrap=True,
            highlight=False,
            color_system=system,
            force_terminal=forced,
            no_color=False if forced else None,
        )


_PLAIN = Manner()
_manner: ContextVar[Manner] = ContextVar("_manner", default=_PLAIN)


@contextmanager
def speaking(manner: Manner) -> Iterator[None]:
    """Every ``Terminal`` made in the block is of this manner."""
    token = _manner.set(manner)
    try:
        yield
    finally:
        _manner.reset(token)


class Terminal:
    """Standard output for results, standard error for progress, which shows only where somebody watches."""

    def __init__(self) -> None:
        self.manner = _manner.get()
        self._out = self.manner.console(stderr=self.manner.aside)
        self._err = self.manner.console(stderr=True)

    @property
    def width(self) -> int | None:
        """How many columns there are; None where no terminal shows them, so that all is written."""
        return self._out.width if self._out.file.isatty() else None

    def say(self, text: str, outcome: str = "") -> None:
        """One or more lines; the word ``outcome`` is coloured where it stands."""
        line = Text(text)
        if outcome:
            line.highlight_regex(rf"\b({outcome}|{outcome.upper()})\b", _STYLES[outcome])
        self._out.print(line)

    def detail(self, text: str, outcome: str = "") -> None:
        """As ``say``, of what nobody misses who wants to see only what is wrong, and how it ended."""
        if not self.manner.quiet:
            self.say(text, outcome)

    def tell(self, text: str, outcome: str = "", *, passed: bool) -> None:
        """A detail where it ``passed``, and said in any case where it did not."""
        (self.detail if passed else self.say)(text, outcome)

    def verdict(self, verdict: Verdict) -> None:
        """The screen of a verdict, or all that it has where more is asked for."""
        self.say(verdict.details if self.manner.verbose else str(verdict), verdict.word)

    def in_turn(self, runs: Sequence[tuple[str, Callable[[], T]]], *, start: str = "", of: int = 0) -> Iterator[T]:
        """What each of ``runs`` gives, one after the other; its title and number show meanwhile.

        ``start``: what stands before the number. ``of``: how many there are, if more than these.
        """
        for number, (title, run) in enumerate(runs, start=1):
            with self.progress(f"{start}{number} of {of or len(runs)}: {title}"):
                found = run()
            yield found

    @contextmanager
    def progress(self, text: str) -> Iterator[Callable[[str], None]]:
        """A line that is gone after the block; call what it yields to replace it meanwhile."""
        # Where nobody watches rich would write there all the same: nothing, which fails on a full disk.
        if self.manner.quiet or not self._err.file.isatty():
            yield lambda text: None
            return
        with self._err.status(text) as status:
            yield status.update
