"""Clocks on several machines. Processes on one machine share its monotonic clock; machines do not."""

import platform
import time
import zlib
from collections.abc import Sequence
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")  # Linux: one for each start of a machine, whatever its name


def now() -> float:
    """Read ``perf_counter``, in seconds, through its module: ranks of a simulated world replace it."""
    return time.perf_counter()


def reading() -> tuple[float, float]:
    """A number for this machine, and its clock now, in seconds."""
    name = _BOOT.read_text() if _BOOT.exists() else platform.node()
    return float(zlib.crc32(name.encode())), now()


def shifts(readings: Sequence[tuple[float, float]]) -> list[float]:
    """Offsets from every rank's clock to rank 0's, by ``reading()`` at one moment on every rank.

    All ranks of a machine share its first rank's offset: their clock is the same.
    """
    first: dict[float, float] = {}
    for machine, now in readings:
        first.setdefault(machine, readings[0][1] - now)
    return [first[machine] for machine, _ in readings]
