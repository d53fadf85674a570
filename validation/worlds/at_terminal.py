"""A rank's terminal: output lines carry its number, and debuggers reach it."""

import fcntl
import io
import pdb
import sys
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

_TERMINAL = "/dev/tty"  # a rank's stdin is empty, and its output may be captured
LEFT = "the debugger was left, or had no terminal: breakpoint() and pdb.set_trace() find one; there, c goes on"


class RankStream(io.TextIOBase):
    """Prefixes lines with ``mark``, and passes on whole lines: ranks write concurrently."""

    def __init__(self, stream: TextIO, mark: str) -> None:
        self._stream = stream
        self._mark = mark
        self._line = ""

    def write(self, text: str) -> int:
        """Buffer incomplete lines."""
        *lines, self._line = f"{self._line}{text}".split("\n")
        if lines:
            self._stream.write("".join(f"{self._mark}{line}\n" for line in lines))
            self._stream.flush()
        return len(text)

    def finish(self) -> None:
        """Complete an open line."""
        if self._line:
            self.write("\n")

    def fileno(self) -> int:
        """Return the descriptor, for direct writers."""
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The inner stream's encoding."""
        return self._stream.encoding

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def debugging(folder: str) -> Path:
    """Return the marker file for an active debugger among ranks sharing ``folder``: runs then have no bound."""
    return Path(folder, "debugging")


def settle(rank: int, folder: str) -> None:
    """Redirect this process's output and debugger as ``rank``."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is not None:
            setattr(sys, name, RankStream(getattr(sys, name), f"[rank {rank}] "))

    def stop(*_: Any, **__: Any) -> None:
        try:
            debugger = _Debugger(rank, folder, open(_TERMINAL), open(_TERMINAL, "w"))
        except OSError:
            raise RuntimeError(
                f"a breakpoint on rank {rank}, and no terminal here to ask at: run this test alone, by pytest in a "
                "terminal, neither under torchrun nor in the background"
            ) from None
        debugger.set_trace(sys._getframe(1))

    pdb.set_trace = stop
    sys.breakpointhook = sys.__breakpointhook__  # the user's chosen debugger, or pdb.set_trace


def finish_lines() -> None:
    """Complete lines that a job left open."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, RankStream):
            stream.finish()


class _Debugger(pdb.Pdb):
    """Python's debugger at the terminal, one rank at a time."""

    def __init__(self, rank: int, folder: str, asked: TextIO, output: TextIO) -> None:
        super().__init__(stdin=asked, stdout=output)
        self.prompt = f"(Pdb rank {rank}) "
        self._folder = folder

    def interaction(self, frame: FrameType | None, *more: Any) -> None:
        """Run pdb's interaction in turn."""
        with debugging(self._folder).open("w") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            super().interaction(frame, *more)
