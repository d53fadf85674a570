"""What this rank is waiting for right now, in words, for whoever must explain a hang."""

from collections.abc import Iterator
from contextlib import contextmanager

_note: object = None


def current() -> str | None:
    """The sentence of the wait in progress, e.g. ``1RECV_F0 from rank 0``; None while nothing is waited for.

    Safe to call from another thread of the same process: it reads one reference.
    """
    return None if _note is None else str(_note)


@contextmanager
def waiting(note: object) -> Iterator[None]:
    """Say what is waited for while the block runs; ``note`` is turned into text only if somebody asks."""
    global _note
    outer, _note = _note, note
    try:
        yield
    finally:
        _note = outer
