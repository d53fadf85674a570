"""Collectives: the k-th calls of all ranks in a communicator are one, with equal terms and a meaning."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.core.observe.stack import Stack, own_stack
from pipeproof.wings.simulated.buffers import copies, describe, fit, race
from pipeproof.wings.simulated.engine.scheduler import NotSimulated, Wait
from pipeproof.wings.simulated.network import Network
from pipeproof.wings.simulated.store import Communicator
from pipeproof.wings.simulated.torch_inside import unwatch
from pipeproof.wings.simulated.work import SimulatedWork

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


def operation_name(operation: Any) -> str:
    """What torch calls a reduction, the same in every run."""
    return next((name for name in _NAMES if operation == getattr(dist.ReduceOp, name)), type(operation).__name__)


def reduction(operation: Any) -> Callable[[Sequence[Tensor]], Tensor]:
    """Return a function that reduces all ranks' tensors in rank order. Raises ``NotSimulated``."""
    found = next((one for name, one in _OPERATIONS.items() if operation == name), None)
    if found is None:
        raise NotSimulated(f"reduction {operation_name(operation)}")
    average = operation == dist.ReduceOp.AVG

    def combine(tensors: Sequence[Tensor]) -> Tensor:
        whole = reduce(found, [tensor.data.reshape(-1) for tensor in tensors])  # whatever their shapes
        return (whole / len(tensors)).to(whole.dtype) if average else whole.clone()

    return combine


def all_reduced(operation: Any) -> Meaning:
    """Give every rank the reduction of each tensor."""
    combine = reduction(operation)
    return lambda brought: [[combine(tensors) for tensors in zip(*brought, strict=True)]] * len(brought)


def reduce_to(operation: Any, root: int) -> Meaning:
    """Give the reduction to one rank; others keep their input."""
    combine = reduction(operation)

    def meaning(brought: Brought) -> Sequence[Sequence[Tensor]]:
        whole = [combine(tensors) for tensors in zip(*brought, strict=True)]
        return [whole if rank == root else own for rank, own in enumerate(brought)]

    return meaning


def of_root(root: int) -> Meaning:
    """Give every rank the root's input."""
    return lambda brought: [brought[root]] * len(brought)


def gather(brought: Brought) -> Sequence[Sequence[Tensor]]:
    """Give every rank a list: each rank's first tensors, then each rank's second, ..."""
    return [[tensor for k in range(len(brought[0])) for tensor in (one[k] for one in brought)]] * len(brought)


def gather_into_one(brought: Brought) -> Sequence[Sequence[Tensor]]:
    """Give every rank, for each input, all ranks' tensors joined into one."""
    return [[torch.cat([one.reshape(-1) for one in tensors]) for tensors in zip(*brought, strict=True)]] * len(brought)


def gather_to(root: int) -> Meaning:
    """Give one rank the first tensor of each."""
    return lambda brought: [[one[0] for one in brought] if rank == root else [] for rank in range(len(brought))]


def scatter_from(root: int) -> Meaning:
    """Give rank r the root's r-th tensor."""
    return lambda brought: [[brought[root][rank]] for rank in range(len(brought))]


def reduce_scatter(operation: Any) -> Meaning:
    """Rank r gets the reduction of the r-th tensors."""
    combine = reduction(operation)
    return lambda brought: [[combine([one[rank] for one in brought])] for rank in range(len(brought))]


def reduce_and_cut(operation: Any) -> Meaning:
    """Rank r gets the r-th part of the reduction, for each tensor."""
    combine = reduction(operation)

    def meaning(brought: Brought) -> Sequence[Sequence[Tensor]]:
        whole = [combine(tensors).reshape(-1).chunk(len(brought)) for tensors in zip(*brought, strict=True)]
        return [[parts[rank] for parts in whole] for rank in range(len(brought))]

    return meaning


def exchange(brought: Brought) -> Sequence[Sequence[Tensor]]:
    """Rank r gets the r-th tensor of each rank."""
    return [[one[rank] for one in brought] for rank in range(len(brought))]


def nothing(brought: Brought) -> Sequence[Sequence[Tensor]]:
    """Give no rank an output: arrival is all."""
    return [[] for _ in brought]


BARRIER = "barrier"


@dataclass(frozen=True)
class CollectiveCall:
    """One rank's call of a collective, with ``inputs`` and ``outputs``.

    ``terms``: a text that must agree on all ranks, with sizes, for example.
    """

    name: str
    terms: str
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    meaning: Meaning

    @property
    def text(self) -> str:
        """The call with the terms that must agree."""
        return f"{self.name}({self.terms})"


_Meeting = dict[int, tuple[CollectiveCall, SimulatedWork]]  # who has arrived, by numbers in the communicator


class Collectives:
    """All collectives of a run."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._meetings: dict[tuple[int, int], _Meeting] = {}

    @unwatch
    def call(self, communicator: Communicator, rank: int, call: CollectiveCall) -> SimulatedWork:
        """Enter the running rank's next collective. Raises the race if other ranks call another."""
        scheduler, stack = self._network.scheduler, own_stack()
        on_stream = self._network.on_stream(communicator)
        number = communicator.calls[rank]
        communicator.calls[rank] += 1
        meeting = self._meetings.setdefault((communicator.number, number), {})
        self._compare(meeting, call, number, stack)

        def wait() -> Wait:
            missing = [there for here, there in communicator.members.items() if here not in meeting]
            return Wait(f"torch.distributed.{call.name}", tuple(sorted(missing)))

        self._look(communicator, call, stack)
        work = SimulatedWork(scheduler, wait, stack, call.inputs, call.outputs, posted_as="called", on_stream=on_stream)
        work.communicator, work.holds_program = communicator, call.name == BARRIER  # for which NCCL's programs wait
        self._network.works.add(work)
        meeting[rank] = call, work
        if len(meeting) == communicator.size:
            del self._meetings[communicator.number, number]
            first = min(work.name for _, work in meeting.values())
            scheduler.offer(first, unwatch(partial(self._happen, meeting)))
        scheduler.pause()
        return work

    def _look(self, communicator: Communicator, call: CollectiveCall, stack: Stack) -> None:
        """Raise the race if buffers of this call wait for a transfer in flight.

        A communicator's collectives on one stream are ordered: an output is ready for the next.
        """
        if self._network.rules.one_stream:
            while (work := self._network.works.pending_in([*call.inputs, *call.outputs])) is not None:
                if work.communicator is not communicator:
                    break
                work.wait()
        self._network.works.uses(call.inputs, stack)
        self._network.works.claims(call.outputs, stack)

    def _compare(self, meeting: _Meeting, call: CollectiveCall, number: int, stack: Stack) -> None:
        if not meeting:
            return
        other, work = next(iter(meeting.values()))  # the first to arrive
        if other.text != call.text:
            own = self._network.scheduler.running
            said = f"collective {number} of a group is {other.text} on rank {work.rank} and {call.text} on rank {own}"
            lines = {f"rank_{work.rank}_called": work.stack, f"rank_{own}_called": stack}
            self._network.scheduler.tell(race("desynchronised", own, said, **lines))

    def _happen(self, meeting: _Meeting) -> None:
        calls = [meeting[rank] for rank in sorted(meeting)]
        for _, work in calls:
            self._network.reads(work)
        first, _ = calls[0]
        results = [copies(gets) for gets in first.meaning([work.given.contents for _, work in calls])]
        at_s = max(work.posted_s for _, work in calls) + self._network.latency_s
        for (call, work), gets in zip(calls, results, strict=True):
            came = gets if call.outputs else ()
            if not fit(came, call.outputs):
                said = f"{work.text} gave rank {work.rank} {describe(came)}, and it received {describe(call.outputs)}"
                work.error, came = race("mismatched", work.rank, said, received=work.stack), ()
            work.end(came, at_s=at_s)
