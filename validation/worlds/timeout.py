"""The bound of a wait, in seconds."""

MOST_SECONDS = 1e6


def seconds(timeout_s: float) -> float:
    """``timeout_s`` itself, if it can be the bound of a wait. Raises ``ValueError``."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s <= MOST_SECONDS:
        raise ValueError(f"timeout_s is {timeout_s!r}: expected seconds above 0, and at most {MOST_SECONDS:g}")
    return timeout_s
