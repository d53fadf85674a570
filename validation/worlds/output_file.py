"""A file of results: opened before the work, so that a bad path costs nothing, and whole or not there at all."""

import errno
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pipeproof.worlds.launcher import reports


class OutputError(ValueError):
    """A file that cannot be written."""


class OutputFile:
    """Where one result goes; None is nowhere. Only rank 0 of a launcher writes.

    A symbolic link stays one: its target is written. A pipe or a device is written as it stands; ``-`` is standard
    output.
    """

    def __init__(self, path: str | None) -> None:
        if path == "":
            raise OutputError("cannot write a file whose name is empty; give it one")
        self._given = path
        self._path = Path(path) if path is not None and reports() else None
        self._partial: Path | None = None  # what will take the place of a regular file
        if self._path is None or path == "-":
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

    def __enter__(self) -> "OutputFile":
        return self

    @property
    def wanted(self) -> bool:
        """Whether anything that is written comes to be anywhere."""
        return self._path is not None

    @property
    def name(self) -> str:
        """The file that is wanted; empty where that is none, or standard output."""
        return "" if self._path is None or self._given in (None, "-") else str(self._given)

    def write(self, content: bytes) -> None:
        """Put ``content`` where the file belongs."""
        if self._path is None:
            return
        if self._given == "-":
            sys.stdout.flush()
            sys.stdout.buffer.write(content)
            sys.stdout.flush()
            return
        with self._refusing():
            if self._partial is None:
                self._path.write_bytes(content)
                return
            self._partial.write_bytes(content)
            if self._path.exists():
                shutil.copymode(self._path, self._partial)
            else:
                os.chmod(self._partial, 0o644)
            os.replace(self._partial, self._path)

    def write_json(self, data: Mapping[str, object]) -> None:
        """Put ``data`` where the file belongs."""
        self.write((json.dumps(finite(data), indent=2, allow_nan=False) + "\n").encode())

    def __exit__(self, *_: object) -> None:
        if self._partial is not None:
            self._partial.unlink(missing_ok=True)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Turn the system's errors into one that says what to do."""
        try:
            yield
        except RuntimeError as error:  # that is how resolve() says so
            raise OutputError(f"cannot write {self._given}: links that lead to each other; choose another") from error
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            cure = "make room there, or choose another" if full else "choose a file in an existing, writable folder"
            raise OutputError(f"cannot write {self._given}: {error.strerror or error}; {cure}") from error


def finite(data: object) -> object:
    """``data`` with text in the place of numbers that are not finite, which JSON lacks; float() reads it back."""
    if isinstance(data, Mapping):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data
