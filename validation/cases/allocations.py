"""The memory that some work takes, counted and not sampled: the profiler's record of every allocation and release."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass
class Allocations:
    """In bytes, of a block of work: what is allocated at its end beyond its beginning, and the most of that at once."""

    net: int = 0
    most: int = 0


@contextmanager
def allocations(device: str = "cpu") -> Iterator[Allocations]:
    """Count what the block allocates on ``device``; what is yielded is filled in when it ends."""
    found = Allocations()
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield found
        torch.cuda.synchronize()
        found.net = torch.cuda.memory_allocated() - before
        found.most = torch.cuda.max_memory_allocated() - before
        return
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        yield found
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    sums = list(accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))
    found.net, found.most = (sums[-1] if sums else 0), max(sums, default=0)
