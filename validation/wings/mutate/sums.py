"""A step's contributions to sums over ranks, and faults in a sum."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.core.observe.digest import digest
from pipeproof.wings.mutate.planting import Planting, differ, replace_call, several

Change = Callable[[Tensor, Tensor], Tensor]  # of a rank's part and of the sum, what the rank gets in its place
Group = tuple[int, ...]  # its ranks
# By group, of each sum: a digest of what a rank gives, empty of zeros, and whether the test's step ran then.
Parts = dict[Group, list[tuple[bytes, bool]]]


def is_sum(tensors: Any, *more: Any, **named: Any) -> bool:
    """Whether a group's ``allreduce``, called so, sums or averages several numbers."""
    given = [getattr(one, "reduceOp", one) for one in (*more, *named.values())]
    operations = [one for one in given if isinstance(one, dist.ReduceOp | dist.ReduceOp.RedOpType)]
    numbers = all(one.is_floating_point() and one.numel() > 1 for one in several(tensors))
    return numbers and all(one == dist.ReduceOp.SUM or one == dist.ReduceOp.AVG for one in operations)


class ChangedSum:
    """A sum in progress. It is changed at the step's wait, not before.

    ``pairs``: what a rank gives, and the tensor that the sum comes into.
    """

    def __init__(self, work: Any, pairs: list[tuple[Tensor, Tensor]], change: Change, fault: Planting) -> None:
        self._work, self._pairs, self._change, self._fault = work, pairs, change, fault
        self._lock = Lock()  # a future ends in a thread of torch

    def wait(self, *arguments: Any, **named: Any) -> Any:
        """Wait, like torch's."""
        result = self._work.wait(*arguments, **named)
        self._finish()
        return result

    def get_future(self) -> Any:
        """Return a future, like torch's."""

        def finish(future: Any) -> Any:
            result = future.value()
            self._finish()
            return result

        return self._work.get_future().then(finish)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def _finish(self) -> None:
        with self._lock, torch.no_grad():
            for part, tensor in self._pairs:
                changed = self._change(part, tensor)
                if differ(changed, tensor):
                    self._fault.hits += 1
                    tensor.data.copy_(changed)
            self._pairs = []


@contextmanager
def parts_of_sums(running: Callable[[], bool]) -> Iterator[Parts]:
    """Collect this rank's contributions to sums while open. ``running``: true during the test's step."""
    parts = Parts()

    def note(allreduce: Any, group: Any, tensors: Any, *more: Any, **named: Any) -> Any:
        if is_sum(tensors, *more, **named):
            nothing = not any(bool(one.any()) for one in several(tensors))
            content = b"" if nothing else b"".join(map(digest, several(tensors)))
            parts.setdefault(tuple(dist.get_process_group_ranks(group)), []).append((content, running()))
        return allreduce(group, tensors, *more, **named)

    with replace_call("allreduce", note, dist.ProcessGroup):
        yield parts


def same_ranks(parts: Sequence[Parts], *, marked: bool) -> Group:
    """Find ranks in a group with equal contributions to each sum; empty without.

    ``marked``: the test marks its step, and only sums inside count.
    """
    for ranks in dict.fromkeys(group for own in parts for group in own if len(group) > 1):
        given = [[part for part, running in parts[rank].get(ranks, ()) if running or not marked] for rank in ranks]
        if any(given[0]) and all(one == given[0] for one in given):
            return ranks
    return ()
