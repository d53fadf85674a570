"""Bounds for waits, in seconds."""

import argparse

MOST_SECONDS = 1e6
BUDGET = 100  # runs spent on reducing a failure
LOOK_S = 0.05  # between two polls
GRACE_S = 0.5  # after the first failure: for other ranks to fail, and handlers to write stacks
ANSWER_S = 1.0  # for a process to report its position, or to be seen dead
END_S = 5.0  # for processes to end, skip, or report last
LAUNCHER_S = 30.0  # for a launcher's other ranks to end: torchrun grants as much
_WANTED = f"expected seconds above 0, and at most {MOST_SECONDS:g}"


def seconds(timeout_s: float) -> float:
    """Return a valid ``timeout_s``. Raises ``ValueError`` for others."""
    number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not number or not 0 < timeout_s <= MOST_SECONDS:
        raise ValueError(f"timeout_s is {timeout_s!r}: {_WANTED}")
    return timeout_s


def parse_seconds(text: str) -> float:
    """Parse a timeout option. Raises argparse's error for users."""
    try:
        return seconds(float(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: {_WANTED}") from None
