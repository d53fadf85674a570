"""Bounds for requests: far above any use, and low enough to end and fit in memory."""

from collections.abc import Sequence

from pipeproof.pipeline.action import ScheduleError

MOST_RANKS = 1 << 12
MOST_MICROBATCHES = 1 << 16
MOST_ACTIONS = 1 << 24  # P = M = 1024 takes three quarters of that with V = 4 and backwards in two parts
MOST_LAYERS = 1 << 12
MOST_PROCESSES = 1 << 8  # ranks that really run
MOST_SEED = (1 << 32) - 1  # numbers computed from a seed stay below torch's 2**64
LONGEST = 80  # characters of a text that is shown in a line
SHOWN = 5  # things that are listed, before the rest is counted
_LARGEST = 1e15  # a number: sums over all actions stay finite, and exact to a few digits


def check_count(what: str, value: int, *, least: int = 1, most: int) -> int:
    """Return ``value`` if within bounds. Raises ``ScheduleError``."""
    if value < least:
        raise ScheduleError(f"{what} is {value}: expected at least {least}")
    if value > most:
        raise ScheduleError(f"{what} is {value}: expected at most {most}")
    return value


def check_measure(what: str, value: float, *, zero: bool = False) -> float:
    """Return ``value`` if finite and above 0, or 0 with ``zero``."""
    if not is_number(value, zero=zero):
        raise ScheduleError(f"{what} is {value:g}: expected {number_wanted(zero=zero)}")
    return value


def is_number(value: float, *, zero: bool) -> bool:
    """True for a valid time, cost or size of memory; nan fails."""
    return 0 <= value <= _LARGEST and (zero or value > 0)


def number_wanted(*, zero: bool) -> str:
    """Describe valid values for ``is_number``."""
    return f"a number {'of at least 0' if zero else 'above 0'}, and at most {_LARGEST:g}"


def some(count: int, what: str) -> str:
    """``1 rank``, ``2 ranks``, ``2 microbatches``."""
    return f"{count} {what}{'' if count == 1 else 'es' if what.endswith(('ch', 'ss')) else 's'}"


def digits(value: float, many: int = 4) -> str:
    """Format ``value`` with ``many`` digits, and more if a factor other than 1 would read as 1."""
    text = f"{value:.{many}g}"
    return text if text != "1" or value == 1 else f"{value:.6g}"


def first_few(things: Sequence[object], separator: str = ", ") -> str:
    """List the first few ``things``, and count the rest: ``a, b, and 3 more``."""
    more = [f"and {len(things) - SHOWN} more"] if len(things) > SHOWN else []
    return separator.join([*map(str, things[:SHOWN]), *more])


def shorten(text: str, width: int | None = LONGEST) -> str:
    """Cut ``text`` if too long; a width of None means a file."""
    return text if width is None or len(text) <= width else f"{text[: max(0, width - 1)]}…"[:width]


def three_digits(value: float) -> str:
    """Format ``1,234``, ``27.5``, ``0.0123``: three digits, and all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
