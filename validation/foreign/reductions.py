"""What a step gives to sums over ranks, and what a fault makes of what comes back."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.observers.digest import digest
from pipeproof.observers.shards import held_here

Hit = Callable[[], None]  # called whenever something is changed
Left = Callable[[Tensor, Tensor], Tensor]  # what becomes of a tensor and of the sum over ranks that it is part of


def several(given: Any) -> list[Any]:
    """A tensor, or many, or none."""
    return [] if given is None else [given] if isinstance(given, Tensor) else list(given)


def differ(one: Tensor, other: Tensor) -> bool:
    """Whether this rank has other numbers of the two, which are of one form. No other rank is asked."""
    here, there = (
        found.to_dense() if found.layout != torch.strided else found for found in map(held_here, (one, other))
    )
    return bool(((here != there) & ~(here.isnan() & there.isnan())).any())


def is_sum(tensors: Any, *more: Any, **named: Any) -> bool:
    """Whether a group's ``allreduce``, called so, sums or averages several numbers."""
    given = [getattr(one, "reduceOp", one) for one in (*more, *named.values())]
    named_ops = [one for one in given if isinstance(one, dist.ReduceOp | dist.ReduceOp.RedOpType)]
    numbers = all(one.is_floating_point() and one.numel() > 1 for one in several(tensors))
    return numbers and all(one == dist.ReduceOp.SUM or one == dist.ReduceOp.AVG for one in named_ops)


class Changed:
    """A reduction under way. What it makes is changed when the step waits for it, not before."""

    def __init__(self, work: Any, tensors: list[Tensor], before: list[Tensor], left: Left, hit: Hit) -> None:
        self._work, self._pairs, self._left, self._hit = work, list(zip(tensors, before, strict=True)), left, hit
        self._lock = Lock()  # a future ends in a thread of torch

    def wait(self, *arguments: Any, **named: Any) -> Any:
        """As torch's."""
        found = self._work.wait(*arguments, **named)
        self._change()
        return found

    def get_future(self) -> Any:
        """As torch's."""

        def change(future: Any) -> Any:
            found = future.value()
            self._change()
            return found

        return self._work.get_future().then(change)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def _change(self) -> None:
        with self._lock, torch.no_grad():
            for tensor, before in self._pairs:
                found = self._left(before, tensor)
                if differ(found, tensor):
                    self._hit()
                    tensor.data.copy_(found)
            self._pairs = []


Key = tuple[tuple[int, ...], int]  # the ranks of a group, and the number of its reduction


@dataclass(frozen=True)
class Given:
    """What a rank gave to a sum, as a digest, and whether the test's step was running."""

    content: bytes
    within: bool


@contextmanager
def noted(within: Callable[[], bool]) -> Iterator[dict[Key, Given]]:
    """What this rank gives to sums over ranks, but for zeros."""
    given: dict[Key, Given] = {}
    counts: dict[tuple[int, ...], int] = {}
    kept = vars(dist.ProcessGroup)["allreduce"]
    reduce: Any = dist.ProcessGroup.allreduce

    def note(group: Any, tensors: Any, *more: Any, **named: Any) -> Any:
        if is_sum(tensors, *more, **named):
            ranks = tuple(dist.get_process_group_ranks(group))
            counts[ranks] = counts.get(ranks, 0) + 1
            if any(bool(one.any()) for one in several(tensors)):
                given[ranks, counts[ranks]] = Given(b"".join(map(digest, several(tensors))), within())
        return reduce(group, tensors, *more, **named)

    dist.ProcessGroup.allreduce = note  # type: ignore[assignment,method-assign]
    try:
        yield given
    finally:
        dist.ProcessGroup.allreduce = kept  # type: ignore[method-assign]


def same_ranks(found: Sequence[Mapping[Key, Given]], *, marked: bool) -> tuple[int, ...]:
    """The ranks of a group that give the same to each sum over them, of all ranks' notes. Empty where there are none.

    Only what was given while the step ran counts, where the test has marked it.
    """
    contents: dict[tuple[int, ...], dict[int, list[bytes]]] = {}
    for given in found:
        for (ranks, number), one in given.items():
            if one.within or not marked:
                contents.setdefault(ranks, {}).setdefault(number, []).append(one.content)
    for ranks, sums in contents.items():
        if len(ranks) > 1 and all(len(each) == len(ranks) and len(set(each)) == 1 for each in sums.values()):
            return ranks
    return ()
