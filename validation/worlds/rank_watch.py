"""A thread that tells the other ranks where this one is stuck, and ends this one once they have gone."""

import os
import sys
import threading
import time
import traceback
from collections.abc import Collection

from validation.worlds.side_store import SideStore

STUCK_STATUS = 3
_LOOK_S = 0.5
_TELL_BOUND_S = 3.0
_OVER_BOUND_S = 60.0


class Watch:
    """Watches one rank, from a thread of its own, for the moment at which the others have given it up."""

    def __init__(self, side: SideStore) -> None:
        self._side = side
        self._stopped = threading.Event()
        self._watched = threading.get_ident()
        self._thread = threading.Thread(target=self._run, daemon=True, name="pipeproof watch")
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, within a bound."""
        self._stopped.set()
        self._thread.join(2 * _LOOK_S)

    def _run(self) -> None:
        rank = self._side.rank
        while not self._stopped.wait(_LOOK_S):
            if self._side.has(f"stack wanted/{rank}"):
                self._side.put(f"stack/{rank}", _stack(self._watched).encode())
                self._side.wait_for("over", _OVER_BOUND_S)
                os._exit(STUCK_STATUS)  # the watched thread may be where nothing but this can end it


def _stack(thread: int) -> str:
    frames = traceback.extract_stack(sys._current_frames()[thread])
    pytests = [index for index, frame in enumerate(frames) if "_pytest" in frame.filename or "pluggy" in frame.filename]
    own = frames[pytests[-1] + 1 :] if pytests else []
    return "".join(traceback.format_list(own or frames))


def stacks(side: SideStore, ranks: Collection[int]) -> dict[int, str]:
    """Where these ranks are stuck, within a bound. From then on they end as soon as the session is over."""
    if side.hurried:  # they are gone, and there is no time
        return {}
    for rank in ranks:
        side.put(f"stack wanted/{rank}", b"")
    deadline_s = time.monotonic() + _TELL_BOUND_S
    told = {}
    for rank in ranks:
        side.wait_for(f"stack/{rank}", deadline_s - time.monotonic())
        told[rank] = (side.get(f"stack/{rank}") or b"in native code, or gone").decode()
    return told
