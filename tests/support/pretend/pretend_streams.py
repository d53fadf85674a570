"""The streams and events of the pretended device, which does what it is given as late as it may.

On a device the host goes on while work is queued. It may rely only on what it, or the stream that reads, has waited
for. Luck hides most that does not wait. Here nothing is luck: a task runs when somebody waits for it and not before.
PRETEND_ORDER=ahead is another order that a device may have: streams other than the first run their tasks at once, and
so overtake the first.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any
from weakref import WeakSet


def _ahead() -> bool:
    """Asked when a stream is made: this module may have been imported before the program was chosen."""
    return os.environ.get("PRETEND_ORDER", "late") == "ahead"


class Stream:
    """As ``torch.Stream``: tasks that run one after the other."""

    def __init__(self, device: object = None, **options: object) -> None:
        self._tasks: deque[Callable[[], object]] = deque()
        self._ahead = _ahead() and bool(_all)
        self._outer: list[Stream] = []
        _all.add(self)

    def give(self, task: Callable[[], object]) -> None:
        """Queue ``task``."""
        self._tasks.append(task)
        if self._ahead:
            self.synchronize()

    def run(self, until: "_Mark | None" = None) -> None:
        """Run what is queued, or what is queued before a mark."""
        while self._tasks and not (until is not None and until.passed):
            self._tasks.popleft()()

    def synchronize(self) -> None:
        self.run()

    def query(self) -> bool:
        return not self._tasks

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def __enter__(self) -> "Stream":
        self._outer.append(current())
        use(self)
        return self

    def __exit__(self, *_: object) -> None:
        use(self._outer.pop())


class _Mark:
    """A place in a stream."""

    def __init__(self, stream: Stream) -> None:
        self.passed = False
        self._stream = stream
        stream.give(self._pass)

    def _pass(self) -> None:
        self.passed = True

    def reach(self) -> None:
        """Have all done that was queued before."""
        if not self.passed:
            self._stream.run(self)


class Event:
    """As ``torch.Event``."""

    def __init__(self, *arguments: object, **options: object) -> None:
        self._mark: _Mark | None = None

    def record(self, stream: Stream | None = None) -> None:
        self._mark = _Mark(stream or current())

    def wait(self, stream: Stream | None = None) -> None:
        if self._mark is not None:
            (stream or current()).give(self._mark.reach)

    def synchronize(self) -> None:
        if self._mark is not None:
            self._mark.reach()

    def query(self) -> bool:
        return self._mark is None or self._mark.passed


_all: WeakSet[Stream] = WeakSet()
_FIRST = Stream()
_own: Any = threading.local()  # autograd runs backwards on a thread of its own, whose stream is the first


def current(device: object = None) -> Stream:
    """The stream that this thread's work is queued in."""
    return getattr(_own, "stream", _FIRST)


def use(stream: Stream) -> None:
    """Queue this thread's work there."""
    _own.stream = stream


def synchronize(device: object = None) -> None:
    """Wait for all streams."""
    for stream in list(_all):
        stream.synchronize()
