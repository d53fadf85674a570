"""What a person sees while commands run: lines, progress, and a file of verdicts. Only rank 0 of a launcher speaks."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.text import Text

from validation.worlds.launcher import reports
from validation.worlds.output_file import OutputFile

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


class JsonFile:
    """A file of verdicts, as JSON."""

    def __init__(self, path: str | None) -> None:
        self._file = OutputFile(path)

    def __enter__(self) -> "JsonFile":
        return self

    def write(self, data: Mapping[str, object]) -> None:
        """Put ``data`` where the file belongs. Numbers that are not finite, which JSON lacks, become text: "inf"."""
        self._file.write((json.dumps(_finite(data), indent=2, allow_nan=False) + "\n").encode())

    def __exit__(self, *_: object) -> None:
        self._file.__exit__()


def _finite(data: object) -> object:
    """``data`` with text in the place of numbers that are not finite: "inf", "-inf" or "nan"."""
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data
