"""A rank and the terminal of whoever started it: what it prints carries its number, and a debugger reaches it."""

import fcntl
import io
import pdb
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

_TERMINAL = "/dev/tty"  # a rank's own standard input is empty, and what it prints may be captured
LEFT = "the debugger was left, or had no terminal: breakpoint() and pdb.set_trace() find one; there, c goes on"


class RankStream(io.TextIOBase):
    """Puts ``mark`` before each line, and hands on whole lines: ranks write side by side."""

    def __init__(self, stream: TextIO, mark: str) -> None:
        self._stream = stream
        self._mark = mark
        self._line = ""

    def write(self, text: str) -> int:
        """Keep what is no whole line yet."""
        *lines, self._line = f"{self._line}{text}".split("\n")
        if lines:
            self._stream.write("".join(f"{self._mark}{line}\n" for line in lines))
            self._stream.flush()
        return len(text)

    def finish(self) -> None:
        """End the line that is not whole."""
        if self._line:
            self.write("\n")

    def fileno(self) -> int:
        """Where the bytes go, for who writes there itself."""
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """As that of the stream behind."""
        return self._stream.encoding

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def debugging(folder: str) -> Path:
    """The file that is there once somebody debugs a rank of those that share ``folder``: then a run has no bound."""
    return Path(folder, "debugging")


def settle(rank: int, folder: str) -> None:
    """Let this process speak as rank ``rank``."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is not None:
            setattr(sys, name, RankStream(getattr(sys, name), f"[rank {rank}] "))

    def stop(*_: Any, **__: Any) -> None:
        _debugger(rank, folder).set_trace(sys._getframe(1))

    pdb.set_trace = stop
    sys.breakpointhook = sys.__breakpointhook__  # the user's own choice of a debugger, or pdb.set_trace


def finish_lines() -> None:
    """End the lines that a job left open."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, RankStream):
            stream.finish()


def _debugger(rank: int, folder: str) -> "_Debugger":
    try:
        return _Debugger(rank, folder, open(_TERMINAL), open(_TERMINAL, "w"))
    except OSError:
        raise RuntimeError(
            f"a breakpoint on rank {rank}, and no terminal here to ask at: run this test alone, by pytest in a "
            "terminal, neither under torchrun nor in the background"
        ) from None


class _Debugger(pdb.Pdb):
    """Python's debugger at the terminal, one rank at a time."""

    def __init__(self, rank: int, folder: str, asked: TextIO, told: TextIO) -> None:
        super().__init__(stdin=asked, stdout=told)
        self.prompt = f"(Pdb rank {rank}) "
        self._folder = folder

    def interaction(self, frame: FrameType | None, *more: Any) -> None:
        """As pdb's."""
        with self._turn():
            super().interaction(frame, *more)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with debugging(self._folder).open("w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            yield
