"""Bounds of what is asked for: far above any use, and low enough that what is allowed ends and fits in memory."""

from collections.abc import Sequence

from pipeproof.pipeline.action import ScheduleError

MOST_RANKS = 1 << 12
MOST_MICROBATCHES = 1 << 16
MOST_ACTIONS = 1 << 24  # P = M = 1024 takes three quarters of that with V = 4 and backwards in two parts
MOST_LAYERS = 1 << 12
MOST_PROCESSES = 1 << 8  # ranks that really run
MOST_SEED = (1 << 32) - 1  # what is computed from a seed stays below torch's 2**64
LONGEST = 80  # characters of a text that is shown in a line
SHOWN = 5  # things that are listed, before the rest is counted
_LARGEST = 1e15  # a number: sums over all actions stay finite, and exact to a few digits


def counted(what: str, value: int, *, least: int = 1, most: int) -> int:
    """``value`` itself, once it is known to be within bounds. Raises ``ScheduleError``."""
    if value < least:
        raise ScheduleError(f"{what} is {value}: expected at least {least}")
    if value > most:
        raise ScheduleError(f"{what} is {value}: expected at most {most}")
    return value


def measured(what: str, value: float, *, zero: bool = False) -> float:
    """``value`` itself, once it is known to be finite and above 0, or 0 where ``zero`` is allowed."""
    if not is_number(value, zero=zero):
        raise ScheduleError(f"{what} is {value:g}: expected {number_wanted(zero=zero)}")
    return value


def is_number(value: float, *, zero: bool) -> bool:
    """Whether a time, a cost or a size of memory can have this value; nan is within no bounds."""
    return 0 <= value <= _LARGEST and (zero or value > 0)


def number_wanted(*, zero: bool) -> str:
    """What ``is_number`` wants, in words."""
    return f"a number {'of at least 0' if zero else 'above 0'}, and at most {_LARGEST:g}"


def some(count: int, what: str) -> str:
    """``1 rank``, ``2 ranks``, ``2 microbatches``."""
    return f"{count} {what}{'' if count == 1 else 'es' if what.endswith(('ch', 'ss')) else 's'}"


def digits(value: float, many: int = 4) -> str:
    """``1.25``, ``-0.333``: ``many`` digits, and more where a factor that is not 1 would be told as 1."""
    told = f"{value:.{many}g}"
    return told if told != "1" or value == 1 else f"{value:.6g}"


def first_few(things: Sequence[object], separator: str = ", ") -> str:
    """The first few of ``things``, and how many more there are: ``a, b, and 3 more``."""
    more = [f"and {len(things) - SHOWN} more"] if len(things) > SHOWN else []
    return separator.join([*map(str, things[:SHOWN]), *more])


def shortened(text: str, width: int | None = LONGEST) -> str:
    """``text``, cut where it is too long; a width of None is that of a file."""
    return text if width is None or len(text) <= width else f"{text[: max(0, width - 1)]}…"[:width]


def three_digits(value: float) -> str:
    """``1,234``, ``27.5``, ``0.0123``: three digits, and all those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
