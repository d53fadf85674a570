"""Collectives: the k-th calls of all ranks in a communicator are one, with equal terms and a meaning."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.core.observe.stack import Stack, own_stack
from pipeproof.pipeline.transports import Rules
from pipeproof.wings.simulated.buffers import copies, describe, fit, race
from pipeproof.wings.simulated.engine.scheduler import NotSimulated, Scheduler, Wait
from pipeproof.wings.simulated.network import Network
from pipeproof.wings.simulated.store import Communicator
from pipeproof.wings.simulated.torch_inside import unwatch
from pipeproof.wings.simulated.work import SimulatedWork

Tensors = Sequence[Tensor]
Brought = Sequence[Tensors]  # by rank
Combine = Callable[[Tensors], Tensor]
Meaning = Callable[[int, Combine, Brought], Brought]  # of the root, a reduction, and what ranks brought

_REDUCTIONS: Mapping[str, Callable[[Tensor, Tensor], Tensor] | None] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
    "PREMUL_SUM": None,
}


def _reduction(operation: Any) -> tuple[str, Combine]:
    """Return torch's name, the same in every run, and a reduction in rank order. Raises ``NotSimulated``."""
    named = (name for name in _REDUCTIONS if operation == getattr(dist.ReduceOp, name))
    name = next(named, type(operation).__name__)
    if (found := _REDUCTIONS.get(name)) is None:
        raise NotSimulated(f"reduction {name}")

    def combine(tensors: Tensors) -> Tensor:
        whole = reduce(found, [tensor.data.reshape(-1) for tensor in tensors])  # whatever their shapes
        return (whole / len(tensors)).to(whole.dtype) if name == "AVG" else whole.clone()

    return name, combine


def reduced(root: int, combine: Combine, brought: Brought) -> Brought:
    """Give the reduction of each tensor."""
    return [[combine(tensors) for tensors in zip(*brought, strict=True)]] * len(brought)


def gathered(root: int, combine: Combine, brought: Brought) -> Brought:
    """Give a list: each rank's first tensors, then each rank's second, ..."""
    return [[tensor for k in range(len(brought[0])) for tensor in (one[k] for one in brought)]] * len(brought)


def joined(root: int, combine: Combine, brought: Brought) -> Brought:
    """Give, for each input, all ranks' tensors joined into one."""
    return [[torch.cat([one.reshape(-1) for one in tensors]) for tensors in zip(*brought, strict=True)]] * len(brought)


def reduced_and_cut(root: int, combine: Combine, brought: Brought) -> Brought:
    """Rank r gets the r-th part of the reduction, for each tensor."""
    whole = [combine(tensors).reshape(-1).chunk(len(brought)) for tensors in zip(*brought, strict=True)]
    return [[parts[rank] for parts in whole] for rank in range(len(brought))]


def exchanged(root: int, combine: Combine, brought: Brought) -> Brought:
    """Rank r gets the r-th tensor of each rank."""
    return [[one[rank] for one in brought] for rank in range(len(brought))]


@dataclass(frozen=True)
class Collective:
    """A collective, by its ``meaning``: the output of each rank; a rank that expects none ignores its own.

    ``terms``: a text that must agree on all ranks, with sizes, for example.
    """

    name: str
    meaning: Meaning
    terms: str = ""


@dataclass(eq=False)
class _Meeting:
    """Works of the ranks that have come, by their numbers in the communicator, and the call of the first."""

    text: str
    meaning: Callable[[Brought], Brought]
    works: dict[int, SimulatedWork] = field(default_factory=dict)


class Net(Network):
    """A network with collectives, for the current run's ranks. A process has one run at a time."""

    current: ClassVar["Net | None"] = None

    def __init__(self, scheduler: Scheduler, rules: Rules, *, latency_s: float = 0.0, room: int = 0) -> None:
        super().__init__(scheduler, rules, latency_s=latency_s, room=room)
        self._meetings: dict[tuple[int, int], _Meeting] = {}

    @unwatch
    def call(
        self, communicator: Communicator, rank: int, what: Collective, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> SimulatedWork:
        """Enter the running rank's next collective. Raises the race if other ranks call another."""
        root, (name, combine) = getattr(opts, "rootRank", 0), _reduction(getattr(opts, "reduceOp", dist.ReduceOp.SUM))
        sizes = {"inputs": _sizes(inputs), "outputs": _sizes(outputs), "count": len(inputs)}
        text = f"{what.name}({what.terms.format(root=root, reduction=name, **sizes)})"
        if what.name == "reduce" and rank != root:
            outputs = ()
        if what.name == "broadcast":
            inputs, outputs = (inputs, ()) if rank == root else ((), outputs)
        stack, number = own_stack(), communicator.calls[rank]
        communicator.calls[rank] += 1
        meaning = partial(what.meaning, root, combine)
        meeting = self._meetings.setdefault((communicator.number, number), _Meeting(text, meaning))
        if not meeting.works:  # also where a race kept another from coming
            meeting.text, meeting.meaning = text, meaning
        elif meeting.text != text:
            work, own = next(iter(meeting.works.values())), self.scheduler.running  # the first to come
            said = f"collective {number} of a group is {meeting.text} on rank {work.rank} and {text} on rank {own}"
            lines = {f"rank_{work.rank}_called": work.stack, f"rank_{own}_called": stack}
            self.scheduler.tell(race("desynchronised", own, said, **lines))

        def wait() -> Wait:
            missing = [there for here, there in communicator.members.items() if here not in meeting.works]
            return Wait(f"torch.distributed.{what.name}", tuple(sorted(missing)))

        self._look(communicator, inputs, outputs, stack)
        on_stream = self.on_stream(communicator)
        work = SimulatedWork(self.scheduler, wait, stack, inputs, outputs, posted_as="called", on_stream=on_stream)
        work.communicator, work.holds_program = communicator, what.name == "barrier"  # for which NCCL's programs wait
        self.works.add(work)
        meeting.works[rank] = work
        if len(meeting.works) == communicator.size:
            del self._meetings[communicator.number, number]
            first = min(one.name for one in meeting.works.values())
            self.scheduler.moves[first] = unwatch(partial(self._happen, meeting))
        self.scheduler.pause()
        return work

    def _look(self, communicator: Communicator, inputs: Tensors, outputs: Tensors, stack: Stack) -> None:
        """Raise the race if buffers of a call wait for a transfer in flight.

        A communicator's collectives on one stream are ordered: an output is ready for the next.
        """
        there = [*inputs, *outputs]
        while self.rules.one_stream and (work := self.works.pending_in(there)) and work.communicator is communicator:
            work.wait()
        self.works.uses(inputs, stack)
        self.works.claims(outputs, stack)

    def _happen(self, meeting: _Meeting) -> None:
        works = [meeting.works[rank] for rank in sorted(meeting.works)]
        for work in works:
            self.reads(work)
        brought = [work.given.contents for work in works]
        results = [
            copies(gets) if work.expected else () for work, gets in zip(works, meeting.meaning(brought), strict=True)
        ]
        at_s = max(work.posted_s for work in works) + self.latency_s
        for work, came in zip(works, results, strict=True):
            if not fit(came, work.expected):
                said = f"{work.text} gave rank {work.rank} {describe(came)}, and it received {describe(work.expected)}"
                work.error, came = race("mismatched", work.rank, said, received=work.stack), ()
            work.end(came, at_s=at_s)


def _sizes(tensors: Tensors) -> str:
    """Describe types and numbers of elements; a transport ignores shapes."""
    return ", ".join(f"{str(tensor.dtype).removeprefix('torch.')}[{tensor.numel()}]" for tensor in tensors)
