"""Collectives: the k-th call of every rank of a communicator is one, and all have to say the same of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor

from pipeproof.worlds.simulated.communicator import Communicator
from pipeproof.worlds.simulated.meanings import Meaning
from pipeproof.worlds.simulated.network import Network
from pipeproof.worlds.simulated.races import copies, described, fit, race
from pipeproof.worlds.simulated.scheduler import Wait
from pipeproof.worlds.simulated.torch_inside import unwatched
from pipeproof.worlds.simulated.work import SimulatedWork
from pipeproof.worlds.stack import Stack, own_stack

BARRIER = "barrier"


@dataclass(frozen=True)
class CollectiveCall:
    """One rank's part of a collective. ``told``: what all ranks must say alike, such as sizes, for people.

    ``brought`` it gives, ``due`` it gets.
    """

    name: str
    told: str
    brought: Sequence[Tensor]
    due: Sequence[Tensor]
    meaning: Meaning

    @property
    def text(self) -> str:
        """It with what must agree."""
        return f"{self.name}({self.told})"


@dataclass
class _Meeting:
    """Those who have come to a collective, by their numbers in the communicator, and who called first.

    Where a device waits for something else, a rank has called and not come.
    """

    first: tuple[CollectiveCall, SimulatedWork] | None = None
    calls: dict[int, tuple[CollectiveCall, SimulatedWork]] = field(default_factory=dict)


class Collectives:
    """The collectives of a run."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._meetings: dict[tuple[int, int], _Meeting] = {}

    @unwatched
    def call(self, communicator: Communicator, rank: int, call: CollectiveCall) -> SimulatedWork:
        """The next collective of the rank that has the turn. Raises the race where others call another."""
        scheduler, stack = self._network.scheduler, own_stack()
        on_stream = self._network.on_stream(communicator)
        number = communicator.calls[rank]
        communicator.calls[rank] += 1
        meeting = self._meetings.setdefault((communicator.number, number), _Meeting())
        self._compare(meeting, call, number, stack)

        def wait() -> Wait:
            missing = [there for here, there in communicator.members.items() if here not in meeting.calls]
            return Wait(f"torch.distributed.{call.name}", tuple(sorted(missing)))

        self._look(communicator, call, stack)
        work = SimulatedWork(scheduler, wait, stack, call.brought, call.due, posted_as="called", on_stream=on_stream)
        work.communicator, work.holds_program = communicator, call.name == BARRIER  # for which NCCL's programs wait
        self._network.works.add(work)
        meeting.first = meeting.first or (call, work)

        def come() -> None:
            meeting.calls[rank] = call, work
            if len(meeting.calls) == communicator.size:
                del self._meetings[communicator.number, number]
                scheduler.offer(min(work.name for _, work in meeting.calls.values()), partial(self._happen, meeting))

        self._network.in_turn(communicator, come)
        scheduler.pause()
        return work

    def _look(self, communicator: Communicator, call: CollectiveCall, stack: Stack) -> None:
        """Raises the race where buffers of this call wait for something that is on its way.

        Of a communicator's collectives on one stream each follows the one before: what one gives is there for the next.
        """
        if self._network.rules.one_stream:
            while (work := self._network.works.pending_in([*call.brought, *call.due])) is not None:
                if work.communicator is not communicator:
                    break
                work.wait()
        self._network.works.gives(communicator, call.brought, stack)
        self._network.works.claims(call.due, stack)

    def _compare(self, meeting: _Meeting, call: CollectiveCall, number: int, stack: Stack) -> None:
        if meeting.first is None:
            return
        other, work = meeting.first
        if other.text != call.text:
            own = self._network.scheduler.running
            said = f"collective {number} of a group is {other.text} on rank {work.rank} and {call.text} on rank {own}"
            lines = {f"rank_{work.rank}_called": work.stack, f"rank_{own}_called": stack}
            self._network.scheduler.tell(race("desynchronised", own, said, **lines))

    def _happen(self, meeting: _Meeting) -> None:
        calls = [meeting.calls[rank] for rank in sorted(meeting.calls)]
        for _, work in calls:
            self._network.reads(work)
        first, _ = calls[0]
        results = [copies(gets) for gets in first.meaning([work.given.contents for _, work in calls])]
        at_s = max(work.posted_s for _, work in calls) + self._network.latency_s
        for (call, work), gets in zip(calls, results, strict=True):
            came = gets if call.due else ()
            if not fit(came, call.due):
                said = f"{work.text} gave rank {work.rank} {described(came)}, and it received {described(call.due)}"
                work.error, came = race("mismatched", work.rank, said, received=work.stack), ()
            work.end(came, at_s=at_s)
