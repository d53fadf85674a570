"""A simulated rank's own time: it passes where the rank sleeps, waits for a message, or computes and that is measured.

What a rank's thread asks the module ``time`` for is of this clock, and its ``sleep`` takes no time of the machine's.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pipeproof.wings.simulated.engine.simulation import Timing

_EPOCH_S = 1.7e9  # the date on which every run begins, for one run is to be as another
_OFTEN, _TICK_S = 1000, 1e-4  # who reads the clock more often than this, and nothing else, waits for it to go on


class Clock:
    """One rank's, in seconds from 0. It runs while the rank has the turn."""

    def __init__(self, timing: Timing) -> None:
        self._at_s = 0.0
        self._measured = timing.measured
        self._since_s: float | None = None
        self._reads = 0

    def start(self) -> None:
        """The rank's thread, which calls this, goes on."""
        self._since_s = time.thread_time() if self._measured else None

    def stop(self) -> None:
        """The rank's thread, which calls this, pauses."""
        self._at_s, self._since_s, self._reads = self.now_s, None, 0

    @property
    def now_s(self) -> float:
        """What it says; while it runs, only the rank's thread may ask."""
        return self._at_s + (0.0 if self._since_s is None else time.thread_time() - self._since_s)

    def read(self) -> float:
        """What it says to the rank's code. Who reads it again and again sees it go on."""
        self._reads += 1
        if self._reads > _OFTEN:
            self._at_s += _TICK_S
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        """Let so many seconds pass."""
        self._at_s += duration_s

    def reach(self, at_s: float) -> None:
        """It is not before then."""
        self._at_s += max(0.0, at_s - self.now_s)


_REAL = frozenset(("asyncio", "concurrent", "multiprocessing"))  # which wait for real things, by a bound of real time


class _Own(threading.local):
    """The clock of the rank whose thread this is, and what gives up its turn."""

    clock: Clock | None = None
    pause: Callable[[], None] | None = None


_own = _Own()


def goes_by(clock: Clock, pause: Callable[[], None]) -> None:
    """This thread, a rank's, goes by ``clock``; ``pause`` lets others go on, where it sleeps."""
    _own.clock, _own.pause = clock, pause


def _reading(name: str, begin_s: float) -> Callable[[], Any]:
    real = getattr(time, name)

    def read() -> Any:
        if _own.clock is None or _waits_really(sys._getframe(1).f_globals):
            return real()
        now_s = begin_s + _own.clock.read()
        return int(now_s * 1e9) if name.endswith("_ns") else now_s

    return read


def _waits_really(asks: Mapping[str, Any]) -> bool:
    """Whether a module of Python's own asks, of those whose waits take the machine's time."""
    return str(asks.get("__name__")).partition(".")[0] in _REAL


def _sleeping() -> Callable[[float], None]:
    real = time.sleep

    def sleep(secs: float, /) -> None:
        if _own.clock is None or not _can_sleep(secs):
            real(secs)  # which says why not
            return
        _own.clock.sleep(float(secs))
        assert _own.pause is not None, "who has a clock has a turn to give up"
        _own.pause()

    return sleep


def _can_sleep(secs: Any) -> bool:
    try:
        return bool(0 <= secs <= threading.TIMEOUT_MAX)
    except TypeError:
        return False


_INSTEAD: dict[str, Callable[..., Any]] = {
    name: _reading(name, _EPOCH_S if name.startswith("time") else 0.0)
    for one in ("time", "monotonic", "perf_counter")
    for name in (one, f"{one}_ns")
} | {"sleep": _sleeping()}


@contextmanager
def virtual_time() -> Iterator[None]:
    """While this is open, the module ``time`` asks the clock of the rank whose thread asks, if it is a rank's."""
    kept = {name: getattr(time, name) for name in _INSTEAD}
    try:
        for name, function in _INSTEAD.items():
            setattr(time, name, function)
        yield
    finally:
        for name, function in kept.items():
            setattr(time, name, function)
