"""The rendezvous store of ranks, and their communicators; a rank that needs a missing key waits for its turn."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # not in __all__

from pipeproof.core.observe.stack import Stack
from pipeproof.wings.simulated.engine.scheduler import Scheduler, Wait

MEETING = "communicator"  # the key under which the first to come leaves its number: hidden from users, and no event
_Key = bytes | str


class SharedStore(Store):
    """Values by key, for one run. A seed may order every call, each an event."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__()
        self._scheduler = scheduler
        self._values: dict[str, bytes] = {}
        self._waiting: dict[int, Sequence[str]] = {}
        self._made: dict[str, int] = {}  # the event that did

    def set(self, key: str, value: _Key) -> None:
        """Set a value, replacing the old."""
        self._scheduler.pause()
        self._put(key, value)

    def get(self, key: str) -> bytes:
        """Return a value, waiting until it exists."""
        self.wait([key])
        self._look_again(key)
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a number, initially 0."""
        self._scheduler.pause()
        if not amount:
            self._look_again(key)
        number = int(self._values.get(key, b"0")) + amount
        if amount or key not in self._values:
            self._put(key, str(number))
        return number

    def compare_set(self, key: str, expected: _Key, desired: _Key) -> bytes:
        """Set ``desired`` if the value is ``expected``, or absent; return the value afterwards."""
        if not key.endswith(MEETING):
            self._scheduler.pause()
            if not self._is(key, expected):
                self._look_again(key)
        if self._is(key, expected):
            self._put(key, desired)
        return self._values.get(key, _bytes(expected))

    def append(self, key: str, value: _Key) -> None:
        """Append to a value."""
        self._scheduler.pause()
        self._put(key, self._values.get(key, b"") + _bytes(value))

    def check(self, keys: Sequence[str]) -> bool:
        """True if all keys exist."""
        self._scheduler.pause()
        return self._scheduler.ask(("key", keys[-1]), lambda: all(key in self._values for key in keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for all keys. Time is simulated: a key that never comes is a deadlock."""
        self._scheduler.pause()
        while missing := [key for key in keys if key not in self._values]:
            self._waiting[self._scheduler.running] = missing
            self._scheduler.block(lambda: Wait(f"the store's key {missing[0]}"))
        for key in keys:
            self._scheduler.history.note_need(self._made[key])
            self._touch(key, changes=False)

    def delete_key(self, key: str) -> bool:
        """Delete a key; true if it existed."""
        self._scheduler.pause()
        self._touch(key, changes=True)
        return self._values.pop(key, None) is not None

    def num_keys(self) -> int:
        """Return the number of keys."""
        self._scheduler.pause()
        return len(self._values)

    deleteKey, getNumKeys = delete_key, num_keys  # torch's names

    def has_extended_api(self) -> bool:
        """True: the store has the extended calls, where for several keys torch calls those for one."""
        return True

    def _is(self, key: str, expected: _Key) -> bool:
        there = self._values.get(key)
        return there == _bytes(expected) or (there is None and not expected)

    def _put(self, key: str, value: _Key) -> None:
        self._values[key] = _bytes(value)
        self._made.setdefault(key, self._scheduler.history.now)
        self._touch(key, changes=True)
        for rank in [rank for rank, keys in self._waiting.items() if key in keys]:
            del self._waiting[rank]
            self._scheduler.wake(rank)

    def _look_again(self, key: str) -> None:
        """Suspend a rank that reads the same key repeatedly, until another changes it."""
        before = self._values.get(key)
        self._scheduler.ask(("key", key), lambda: self._values.get(key) != before)

    def _touch(self, key: str, *, changes: bool) -> None:
        if not key.endswith(MEETING):
            self._scheduler.touch(("key", key), changes=changes)


def _bytes(value: Any) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


@dataclass(eq=False)
class Communicator:
    """A communicator of several ranks. ``members``: each arrived rank's world number, by its number here.

    ``made``: the place where each made its group. ``on_host``: programs wait, not devices.
    """

    number: int
    size: int
    on_host: bool
    members: dict[int, int] = field(default_factory=dict)
    made: dict[int, Stack] = field(default_factory=dict)
    calls: Counter[int] = field(default_factory=Counter)  # of collectives, by the rank's number in here
