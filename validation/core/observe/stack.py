"""Where in the user's own code something was called for: the stack without torch, Python and pipeproof."""

import linecache
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import parent_process
from pathlib import Path
from types import FrameType

_MOST = 3  # lines that are kept of a stack
_LONGEST = 80  # characters of a line that are shown
_MACHINERY = sys.stdlib_module_names | {"torch", "pipeproof", "typing_extensions"}  # what it calls is called by these
_PLANTED = "pipeproof.wings.specimens.families."  # plays the user's part
_INSTALLED = {"site-packages", "dist-packages"}  # folders of packages that are not the user's own


@dataclass(frozen=True)
class Line:
    """A line of code: its file, its number from 1 on, the function around it, and what it says."""

    file: str
    number: int
    function: str
    text: str

    @property
    def place(self) -> str:
        """Where it is, without what it says."""
        path = Path(self.file)
        short = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
        return f"{short}:{self.number} {self.function}"

    def __str__(self) -> str:
        text = self.text if len(self.text) <= _LONGEST else f"{self.text[: _LONGEST - 1]}…"
        return f"{self.place}{': ' * bool(text)}{text}"


Stack = tuple[Line, ...]  # the innermost line first


def own_stack() -> Stack:
    """The lines through which this call came; empty where none of them is the user's.

    Of an installed package its innermost line alone is kept, and only where that comes before the user's own.
    """
    return stack_of(sys._getframe(1))


def stack_of(frame: FrameType) -> Stack:
    """The same of ``frame``, which may be another thread's."""
    kept: list[Line] = []
    for one in _frames(frame):
        if not (kept and _installed(one.f_code.co_filename)):
            kept.append(_line(one.f_code.co_filename, one.f_lineno, one.f_code.co_name))
        if len(kept) == _MOST:
            break
    return tuple(kept)


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Outwards, but for those of the machinery."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        own = module.startswith(_PLANTED) or module.partition(".")[0] not in _MACHINERY
        started = frame.f_back is None and frame.f_code.co_filename == "<string>" and parent_process() is not None
        if own and not started:  # a process is started by a line of multiprocessing
            yield frame
        frame = frame.f_back


@lru_cache(maxsize=4096)
def _installed(file: str) -> bool:
    return not _INSTALLED.isdisjoint(Path(file).parts)


def _line(file: str, number: int, function: str) -> Line:
    linecache.checkcache(file)  # what was changed and loaded again has other lines
    return Line(file, number, function, linecache.getline(file, number).strip())
