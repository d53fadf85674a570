"""Standard output that takes no more: its reader has stopped, or there is no room."""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, TextIO

from pipeproof.worlds.launcher import reports
from pipeproof.worlds.output_file import OutputError


class ReaderGone(Exception):
    """Whoever read standard output has stopped, as ``head`` does."""


@contextmanager
def standard_output() -> Iterator[None]:
    """Raise ``ReaderGone`` or ``OutputError`` where standard output takes no more, at the latest at the end."""
    if sys.stdout is None:  # Python's way to say so; the next file to be opened would take its place
        raise OutputError("cannot write standard output: it is closed; send it to a file, or to /dev/null")
    with open(os.devnull, "w") as nowhere, redirect_stdout(_WatchedStream(sys.stdout if reports() else nowhere)):
        try:
            yield
        finally:
            sys.stdout.flush()


class _WatchedStream:
    """A stream that tells its own failures from those of files and connections."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream  # of text, or of bytes

    def write(self, content: Any) -> int:
        raw = getattr(self._stream, "buffer", self._stream)
        with self._watching():
            if not isinstance(raw, io.RawIOBase):
                return int(self._stream.write(content))
            # With PYTHONUNBUFFERED, Python drops what a write leaves over, and a reader that goes is not noticed.
            data = content if isinstance(content, bytes) else content.encode(self.encoding, self.errors)
            while data:
                if (written := raw.write(data)) is None:
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                data = data[written:]
            return len(content)

    @property
    def buffer(self) -> "_WatchedStream":
        """Where bytes go."""
        return _WatchedStream(self._stream.buffer)

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
            raise OutputError(f"cannot write standard output: {error.strerror or error}; send it elsewhere") from error


def discard(stream: TextIO) -> None:
    """Let what is left in the buffer go nowhere, or the interpreter fails once more when it ends."""
    with suppress(OSError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
