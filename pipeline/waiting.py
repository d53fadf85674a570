"""This rank's current wait, in words, to explain a hang."""

DEFAULT_TIMEOUT_S = 120.0  # for a message, or for the other ranks to come, on a busy machine
_note: object = None


def current() -> str | None:
    """Describe the wait in progress, e.g. ``1RECV_F0 from rank 0``; None without one.

    Safe to call from another thread of the same process: it reads one reference.
    """
    return None if _note is None else str(_note)


class waiting:
    """Name the current wait during the block; ``note`` becomes text only on demand.

    A class, because every message passes here and contextlib's generators cost several times as much; with a small
    letter, because it reads as a verb in use.
    """

    def __init__(self, note: object) -> None:
        self._inner = note

    def __enter__(self) -> None:
        global _note
        self._outer, _note = _note, self._inner

    def __exit__(self, *_: object) -> None:
        global _note
        _note = self._outer
