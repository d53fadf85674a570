"""The bound of a wait, in seconds."""

import argparse
import math

MOST_SECONDS = 1e6
BUDGET = 100  # runs, to find a smaller one that fails
LOOK_S = 0.05  # between two looks at whether something has happened
GRACE_S = 0.5  # after the first failure, for the other ranks to fail by themselves, and for a handler to write a stack
ANSWER_S = 1.0  # for a process to say where it is, or to be seen dead
END_S = 5.0  # for what is told to end, to skip or to say its last words
LAUNCHER_S = 30.0  # for the other ranks of a launcher to end: torchrun grants as much to ranks that it ends
_WANTED = f"expected seconds above 0, and at most {MOST_SECONDS:g}"


def seconds(timeout_s: float) -> float:
    """``timeout_s`` itself, if it can be the bound of a wait. Raises ``ValueError``."""
    if not _can_be(timeout_s):
        raise ValueError(f"timeout_s is {timeout_s!r}: {_WANTED}")
    return timeout_s


def parsed_seconds(text: str) -> float:
    """What an option says. Raises what argparse tells users of."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not _can_be(found):
        raise argparse.ArgumentTypeError(f"{text!r}: {_WANTED}")
    return found


def _can_be(timeout_s: float) -> bool:
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    return is_number and 0 < timeout_s <= MOST_SECONDS
