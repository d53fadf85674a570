"""What a person sees while commands run: lines, progress, and a file of verdicts. Only rank 0 of a launcher speaks."""

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.text import Text

_STYLES = {"pass": "green", "fail": "bold red", "unknown": "bold yellow"}


class OutputError(ValueError):
    """A file that cannot be written."""


class Terminal:
    """Standard output for results, standard error for progress, which shows only where somebody watches."""

    def __init__(self) -> None:
        self._quiet = os.environ.get("RANK", "0") != "0"
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
        with self._err.status(text) as status:
            yield status.update


class JsonFile:
    """A file of verdicts: opened before the work, so that a bad path costs nothing, and whole or not there at all.

    A symbolic link stays one: its target is written. A pipe or a device is written as it stands.
    """

    def __init__(self, path: str | None) -> None:
        self._given = path
        self._path = None if path is None or os.environ.get("RANK", "0") != "0" else Path(path)
        self._partial: Path | None = None  # what will take the place of a regular file
        if self._path is None:
            return
        with self._refusing():
            if self._path.is_dir():
                raise IsADirectoryError("it is a directory")
            if self._path.exists() and not self._path.is_file():
                if not os.access(self._path, os.W_OK):
                    raise PermissionError("no permission to write")
                return
            self._path = self._path.resolve()
            descriptor, name = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
            os.close(descriptor)
            self._partial = Path(name)

    def __enter__(self) -> "JsonFile":
        return self

    def write(self, data: Mapping[str, object]) -> None:
        """Put ``data`` where the file belongs. Numbers that are not finite, which JSON lacks, become text: "inf"."""
        if self._path is None:
            return
        text = json.dumps(_finite(data), indent=2, allow_nan=False) + "\n"
        with self._refusing():
            if self._partial is None:
                self._path.write_text(text)
                return
            self._partial.write_text(text)
            if self._path.exists():
                shutil.copymode(self._path, self._partial)
            else:
                os.chmod(self._partial, 0o644)
            os.replace(self._partial, self._path)

    def __exit__(self, *_: object) -> None:
        if self._partial is not None:
            self._partial.unlink(missing_ok=True)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turn the system's errors into one that says what to do."""
        try:
            yield
        except OSError as error:
            cure = "choose a file in an existing, writable folder"
            raise OutputError(f"cannot write {self._given}: {error.strerror or error}; {cure}") from error


def _finite(data: object) -> object:
    """``data`` with text in the place of numbers that are not finite: "inf", "-inf" or "nan"."""
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data
