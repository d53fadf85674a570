"""Standard output while a command runs: silent on ranks that do not report, and with failures of its own kind."""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, TextIO

from validation.worlds.launcher import reports
from validation.worlds.output_file import OutputError


class ReaderGone(Exception):
    """Whoever read standard output has stopped, as ``head`` does."""


@contextmanager
def standard_output() -> Iterator[None]:
    """Raise ``ReaderGone`` or ``OutputError`` where standard output takes no more, at the latest at the end."""
    if sys.stdout is None:  # Python's way to say so; the next file to be opened would take its place
        raise OutputError("cannot write standard output: it is closed; send it to a file, or to /dev/null")
    with open(os.devnull, "w") as nowhere, redirect_stdout(_Watched(sys.stdout if reports() else nowhere)):
        try:
            yield
        finally:
            sys.stdout.flush()


class _Watched:
    """A stream whose failures can be told from those of files and connections."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        raw = getattr(self._stream, "buffer", None)
        with self._watching():
            if not isinstance(raw, io.RawIOBase):
                return self._stream.write(text)
            # With PYTHONUNBUFFERED, Python drops what a write leaves over, and a reader that goes is not noticed.
            _write_all(raw, text.encode(self._stream.encoding, self._stream.errors or "strict"))
            return len(text)

    def flush(self) -> None:
        with self._watching():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError as error:
            discard(self._stream)
            raise ReaderGone from error
        except OSError as error:
            discard(self._stream)
            raise OutputError(f"cannot write standard output: {error.strerror or error}") from error


def _write_all(raw: io.RawIOBase, data: bytes) -> None:
    while data:
        written = raw.write(data)
        if written is None:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        data = data[written:]


def discard(stream: TextIO) -> None:
    """Let what is left in the buffer go nowhere, or the interpreter fails once more when it ends."""
    with suppress(OSError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
