"""User code lines behind a call: the stack without torch, Python and pipeproof."""

import linecache
import sys
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import parent_process
from pathlib import Path
from types import FrameType

_MOST = 3  # lines kept per stack
_LONGEST = 80  # characters shown per line
_MACHINERY = sys.stdlib_module_names | {"torch", "pipeproof", "typing_extensions"}  # frames to skip
_PLANTED = "pipeproof.wings.specimens.families."  # specimens play the user
_INSTALLED = {"site-packages", "dist-packages"}  # folders with installed packages


@dataclass(frozen=True)
class Line:
    """A code line: file, number from 1, function, text."""

    file: str
    number: int
    function: str
    text: str

    @property
    def place(self) -> str:
        """The place, without the text."""
        return f"{self.path}:{self.number} {self.function}"

    @property
    def path(self) -> str:
        """The file, relative to the current folder if it lies in there."""
        path = Path(self.file)
        return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)

    def __str__(self) -> str:
        text = self.text if len(self.text) <= _LONGEST else f"{self.text[: _LONGEST - 1]}…"
        return f"{self.place}{': ' * bool(text)}{text}"


Stack = tuple[Line, ...]  # the innermost line first


def own_stack() -> Stack:
    """Return the user lines behind this call; empty if none.

    From an installed package, keep the innermost line alone, and only if it precedes the user's own.
    """
    return stack_of(sys._getframe(1))


def stack_of(frame: FrameType) -> Stack:
    """Return the user lines behind ``frame``, possibly in another thread."""
    kept: list[Line] = []
    outward: FrameType | None = frame
    while outward is not None and len(kept) < _MOST:
        code, number, module = outward.f_code, outward.f_lineno, str(outward.f_globals.get("__name__"))
        file, outward = code.co_filename, outward.f_back
        own = module.startswith(_PLANTED) or module.partition(".")[0] not in _MACHINERY
        # multiprocessing starts a process with a line
        started = outward is None and file == "<string>" and parent_process() is not None
        if own and not started and not (kept and _is_installed(file)):
            linecache.checkcache(file)  # reloaded files change their lines
            kept.append(Line(file, number, code.co_name, linecache.getline(file, number).strip()))
    return tuple(kept)


@lru_cache(maxsize=4096)
def _is_installed(file: str) -> bool:
    return not _INSTALLED.isdisjoint(Path(file).parts)
