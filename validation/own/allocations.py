"""Count memory exactly, from the profiler's record of allocations and releases.

The record excludes releases of earlier allocations.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile, record_function

from pipeproof.worlds import accelerator

_MARK = "pipeproof: memory is counted from here"


@dataclass
class Allocations:
    """A block's memory in bytes: net allocation at its end, and peak since ``mark``.

    Without a mark, the peak covers the whole block.
    """

    device: str
    net: int = 0
    most: int = 0

    def mark(self) -> None:
        """Start counting the peak."""
        if self.device != accelerator.CPU:
            accelerator.begin_peak()
        with record_function(_MARK):
            pass


@contextmanager
def allocations(device: str = accelerator.CPU) -> Iterator[Allocations]:
    """Count the block's allocations on ``device``; the yielded value is filled at the end."""
    found = Allocations(device)
    if device != accelerator.CPU:
        found.mark()
        before = accelerator.memory_in_use()
        yield found
        found.net = accelerator.memory_in_use() - before
        found.most = accelerator.peak() - before
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        yield found
    every = sorted(record.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    events = [event for event in every if event.name() in ("[memory]", _MARK)]
    first = max((k for k, event in enumerate(events) if event.name() == _MARK), default=0)
    held = list(accumulate(event.nbytes() if event.name() != _MARK else 0 for event in events))
    found.net, found.most = (held[-1] if held else 0), max(held[first:], default=0)
