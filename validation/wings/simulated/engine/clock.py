"""A simulated rank's own time: it passes during sleep, waits for messages, and measured computation.

In a rank's thread the module ``time`` reads this clock, and ``sleep`` takes no real time.
"""

import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from pipeproof.wings.simulated.engine.simulation import Timing

_EPOCH_S = 1.7e9  # the date on which every run begins, for one run is to be as another
_OFTEN, _TICK_S = 1000, 1e-4  # who reads the clock more often than this, and nothing else, waits for it to go on


class Clock:
    """One rank's clock, in seconds from 0. It runs during the rank's turn."""

    def __init__(self, timing: Timing) -> None:
        self._at_s = 0.0
        self._measured = timing.measured
        self._since_s: float | None = None
        self._reads = 0

    def start(self) -> None:
        """Resume, called by the rank's thread."""
        self._since_s = time.thread_time() if self._measured else None

    def stop(self) -> None:
        """Pause, called by the rank's thread."""
        self._at_s, self._since_s, self._reads = self.now_s, None, 0

    @property
    def now_s(self) -> float:
        """Return the time; a running clock is read only by its rank's thread."""
        return self._at_s + (0.0 if self._since_s is None else time.thread_time() - self._since_s)

    def read(self) -> float:
        """Return the time for the rank's code. Repeated reads advance it."""
        self._reads += 1
        if self._reads > _OFTEN:
            self._at_s += _TICK_S
        return self.now_s

    def sleep(self, duration_s: float) -> None:
        """Let a number of seconds pass."""
        self._at_s += duration_s

    def reach(self, at_s: float) -> None:
        """Advance to this time, unless already past."""
        self._at_s += max(0.0, at_s - self.now_s)


_REAL = frozenset(("asyncio", "concurrent", "multiprocessing"))  # which wait for real things, by a bound of real time


class _Own(threading.local):
    """The clock of the current thread's rank, and the function that yields its turn."""

    clock: Clock | None = None
    pause: Callable[[], None] | None = None


_own = _Own()


def goes_by(clock: Clock, pause: Callable[[], None]) -> None:
    """Bind this rank's thread to ``clock``; ``pause`` yields to others during sleep."""
    _own.clock, _own.pause = clock, pause


def _reading(name: str, begin_s: float) -> Callable[[], Any]:
    real = getattr(time, name)

    def read() -> Any:
        asks = str(sys._getframe(1).f_globals.get("__name__")).partition(".")[0]
        if _own.clock is None or asks in _REAL:
            return real()
        now_s = begin_s + _own.clock.read()
        return int(now_s * 1e9) if name.endswith("_ns") else now_s

    return read


_sleep_really = time.sleep


def _sleep(secs: float, /) -> None:
    try:
        can = bool(0 <= secs <= threading.TIMEOUT_MAX)
    except TypeError:
        can = False
    if _own.clock is None or not can:
        _sleep_really(secs)  # raises the proper error
        return
    _own.clock.sleep(float(secs))
    assert _own.pause is not None, "who has a clock has a turn to give up"
    _own.pause()


_INSTEAD: dict[str, Any] = {
    name: _reading(name, _EPOCH_S if name.startswith("time") else 0.0)
    for one in ("time", "monotonic", "perf_counter")
    for name in (one, f"{one}_ns")
} | {"sleep": _sleep}


def virtual_time() -> AbstractContextManager[object]:
    """Redirect the module ``time`` to the calling rank's clock while open."""
    replaced: AbstractContextManager[object] = mock.patch.multiple(time, **_INSTEAD)
    return replaced
