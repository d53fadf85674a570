"""What each collective gives: a function of what all ranks brought, by rank, to what each rank's buffers get."""

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from threading import Thread, current_thread
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

Brought = Sequence[Sequence[Tensor]]  # by rank
Meaning = Callable[[Brought], Sequence[Sequence[Tensor]]]

_OPERATIONS: Mapping[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


_NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")


class NotSimulated(NotImplementedError):
    """What the simulated world does not have.

    ``refusals``: all of this run, with the threads that they were made on: code that catches one goes on with what no
    real rank would have.
    """

    refusals: ClassVar[list[tuple[Thread, str]]] = []

    def __init__(self, what: str) -> None:
        super().__init__(f"the simulated world has no {what}: run this on real ranks, in World()")
        self.refusals.append((current_thread(), str(self)))


class AnotherRanks(RuntimeError):
    """A rank has what is another's: some code keeps it where ranks that are threads share it."""

    def __init__(self, what: str, rank: int, owner: str) -> None:
        super().__init__(
            f"rank {rank} used a {what} of {owner}: it is kept in a module, a class or a cache, which simulated ranks "
            "share and processes do not: run this on real ranks, in World()"
        )


def named(operation: Any) -> str:
    """What torch calls a reduction, the same in every run."""
    return next((name for name in _NAMES if operation == getattr(dist.ReduceOp, name)), type(operation).__name__)


def reduced(operation: Any) -> Callable[[Sequence[Tensor]], Tensor]:
    """Tensors of all ranks, one of each, as one: added in the order of ranks. Raises ``NotSimulated``."""
    found = next((one for name, one in _OPERATIONS.items() if operation == name), None)
    if found is None:
        raise NotSimulated(f"reduction {named(operation)}")
    average = operation == dist.ReduceOp.AVG

    def combine(tensors: Sequence[Tensor]) -> Tensor:
        whole = reduce(found, [tensor.data.reshape(-1) for tensor in tensors])  # whatever their shapes
        return (whole / len(tensors)).to(whole.dtype) if average else whole.clone()

    return combine


def all_reduced(operation: Any) -> Meaning:
    """Every rank gets the reduction of each tensor."""
    combine = reduced(operation)
    return lambda brought: [[combine(tensors) for tensors in zip(*brought, strict=True)]] * len(brought)


def reduced_to(operation: Any, root: int) -> Meaning:
    """One rank gets it; the others keep what they brought."""
    combine = reduced(operation)

    def meaning(brought: Brought) -> Sequence[Sequence[Tensor]]:
        whole = [combine(tensors) for tensors in zip(*brought, strict=True)]
        return [whole if rank == root else own for rank, own in enumerate(brought)]

    return meaning


def of_root(root: int) -> Meaning:
    """Every rank gets what one brought."""
    return lambda brought: [brought[root]] * len(brought)


def gathered(brought: Brought) -> Sequence[Sequence[Tensor]]:
    """Every rank gets a list: of the first tensor of each rank, then of the second of each, ..."""
    return [[tensor for k in range(len(brought[0])) for tensor in (one[k] for one in brought)]] * len(brought)


def gathered_into_one(brought: Brought) -> Sequence[Sequence[Tensor]]:
    """Every rank gets one tensor, for each that it brought: all ranks' one after the other."""
    return [[torch.cat([one.reshape(-1) for one in tensors]) for tensors in zip(*brought, strict=True)]] * len(brought)


def gathered_by(root: int) -> Meaning:
    """One rank gets the first tensor of each."""
    return lambda brought: [[one[0] for one in brought] if rank == root else [] for rank in range(len(brought))]


def scattered_by(root: int) -> Meaning:
    """Rank r gets the r-th tensor of one rank."""
    return lambda brought: [[brought[root][rank]] for rank in range(len(brought))]


def reduced_and_scattered(operation: Any) -> Meaning:
    """Rank r gets the reduction of the r-th tensors."""
    combine = reduced(operation)
    return lambda brought: [[combine([one[rank] for one in brought])] for rank in range(len(brought))]


def reduced_and_cut(operation: Any) -> Meaning:
    """Rank r gets the r-th part of the reduction, for each tensor."""
    combine = reduced(operation)

    def meaning(brought: Brought) -> Sequence[Sequence[Tensor]]:
        whole = [combine(tensors).reshape(-1).chunk(len(brought)) for tensors in zip(*brought, strict=True)]
        return [[parts[rank] for parts in whole] for rank in range(len(brought))]

    return meaning


def exchanged(brought: Brought) -> Sequence[Sequence[Tensor]]:
    """Rank r gets the r-th tensor of each rank."""
    return [[one[rank] for one in brought] for rank in range(len(brought))]


def nothing(brought: Brought) -> Sequence[Sequence[Tensor]]:
    """Nobody gets anything: all have come."""
    return [[] for _ in brought]
