"""The memory that some work takes, counted and not sampled: the profiler's record of every allocation and release.

What was allocated before, and is let go of meanwhile, is not in that record.
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
    """In bytes, of a block of work: what it allocated and still holds at its end, and the most at once since ``mark``.

    Where nobody marks, the most is that of the whole block.
    """

    device: str
    net: int = 0
    most: int = 0

    def mark(self) -> None:
        """Here begins what may be the most."""
        if self.device != accelerator.CPU:
            accelerator.begin_peak()
        with record_function(_MARK):
            pass


@contextmanager
def allocations(device: str = accelerator.CPU) -> Iterator[Allocations]:
    """Count what the block allocates on ``device``; what is yielded is filled in when it ends."""
    found = Allocations(device)
    if device != accelerator.CPU:
        found.mark()
        before = accelerator.held()
        yield found
        found.net = accelerator.held() - before
        found.most = accelerator.peak() - before
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        yield found
    every = sorted(record.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    events = [event for event in every if event.name() in ("[memory]", _MARK)]
    first = max((k for k, event in enumerate(events) if event.name() == _MARK), default=0)
    held = list(accumulate(event.nbytes() if event.name() != _MARK else 0 for event in events))
    found.net, found.most = (held[-1] if held else 0), max(held[first:], default=0)
