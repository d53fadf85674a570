"""Result files: opened before the work, so that bad paths fail early, and written whole or not at all."""

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
    """Raised for an unwritable file."""


class OutputFile:
    """Destination for one result; None discards it. Only a launcher's rank 0 writes.

    Symbolic links stay: their target is written. Pipes and devices are written directly; ``-`` means standard
    output.
    """

    def __init__(self, path: str | None) -> None:
        if path == "":
            raise OutputError("cannot write a file whose name is empty; give it one")
        self._given = path
        self._path = Path(path) if path is not None and reports() else None
        self._partial: Path | None = None  # replaces a regular file at the end
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
        """True if output goes anywhere."""
        return self._path is not None

    @property
    def name(self) -> str:
        """The requested file; empty for none or standard output."""
        return "" if self._path is None or self._given in (None, "-") else str(self._given)

    def write(self, content: bytes) -> None:
        """Write ``content`` to the destination."""
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
        """Write ``data`` as JSON to the destination."""
        self.write((json.dumps(finite(data), indent=2, allow_nan=False) + "\n").encode())

    def __exit__(self, *_: object) -> None:
        if self._partial is not None:
            self._partial.unlink(missing_ok=True)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Convert system errors into one with advice."""
        try:
            yield
        except RuntimeError as error:  # raised by resolve() for link cycles
            raise OutputError(f"cannot write {self._given}: links that lead to each other; choose another") from error
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            cure = "make room there, or choose another" if full else "choose a file in an existing, writable folder"
            raise OutputError(f"cannot write {self._given}: {error.strerror or error}; {cure}") from error


def finite(data: object) -> object:
    """Replace non-finite numbers, which JSON lacks, by text; float() reads them back."""
    if isinstance(data, Mapping):
        return {key: finite(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [finite(value) for value in data]
    return str(data) if isinstance(data, float) and not math.isfinite(data) else data
