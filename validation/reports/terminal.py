"""What a person sees while commands run: lines and progress. Only rank 0 of a launcher speaks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from pipeproof.worlds.launcher import reports

_STYLES = {"pass": "green", "fail": "bold red", "unknown": "bold yellow"}


class Terminal:
    """Standard output for results, standard error for progress, which shows only where somebody watches."""

    def __init__(self) -> None:
        self._quiet = not reports()
        self._out = Console(quiet=self._quiet, soft_wrap=True, highlight=False)
        self._err = Console(stderr=True, quiet=self._quiet)

    def say(self, text: str, outcome: str = "") -> None:
        """One or more lines; the word ``outcome`` is coloured where it stands."""
        line = Text(text)
        if outcome:
            line.highlight_regex(rf"\b({outcome}|{outcome.upper()})\b", _STYLES[outcome])
        self._out.print(line)

    @contextmanager
    def progress(self, text: str) -> Iterator[Callable[[str], None]]:
        """A line that is gone after the block; call what it yields to replace it meanwhile."""
        if not self._err.is_terminal:  # rich would write there all the same: nothing, which fails on a full disk
            yield lambda text: None
            return
        with self._err.status(text) as status:
            yield status.update
