"""What a person sees while commands run: lines, progress, and a file of verdicts. Only rank 0 of a launcher speaks."""

import json
import os
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
    """A file of verdicts: opened before the work, so that a bad path costs nothing, and whole or not there at all."""

    def __init__(self, path: str | None) -> None:
        self._path = None if path is None or os.environ.get("RANK", "0") != "0" else Path(path)
        if self._path is None:
            return
        try:
            if self._path.is_dir():
                raise IsADirectoryError("it is a directory")
            descriptor, name = tempfile.mkstemp(dir=self._path.parent or Path("."), prefix=f".{self._path.name}.")
        except OSError as error:
            reason = error.strerror or str(error)
            cure = "choose a file in an existing, writable folder"
            raise OutputError(f"cannot write {path}: {reason}; {cure}") from error
        os.close(descriptor)
        self._partial = Path(name)

    def __enter__(self) -> "JsonFile":
        return self

    def write(self, data: Mapping[str, object]) -> None:
        """Put ``data`` where the file belongs."""
        if self._path is not None:
            self._partial.write_text(json.dumps(data, indent=2) + "\n")
            os.chmod(self._partial, 0o644)
            os.replace(self._partial, self._path)

    def __exit__(self, *_: object) -> None:
        if self._path is not None:
            self._partial.unlink(missing_ok=True)
