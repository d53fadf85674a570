"""What each rank has asked of the network, until it returns: what it may use, and what it waits for."""

from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor

from pipeproof.worlds.rank_report import Race
from pipeproof.worlds.simulated.communicator import Communicator
from pipeproof.worlds.simulated.races import overlap, race
from pipeproof.worlds.simulated.scheduler import Scheduler
from pipeproof.worlds.simulated.work import SimulatedWork
from pipeproof.worlds.stack import Stack


class Works:
    """Those of all ranks."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._all: defaultdict[int, list[SimulatedWork]] = defaultdict(list)
        self._unmet: defaultdict[int, list[SimulatedWork]] = defaultdict(list)

    def add(self, work: SimulatedWork) -> SimulatedWork:
        """Keep ``work`` in mind until its rank returns, and until then what it has not waited for."""
        self._all[work.rank].append(work)
        self._unmet[work.rank].append(work)
        return work

    def pop(self, rank: int) -> Sequence[SimulatedWork]:
        """All of a rank, which has returned."""
        return self._all.pop(rank, ())

    def unmet(self, rank: int) -> list[SimulatedWork]:
        """What a rank has not waited for, but for sends that have left."""
        unmet = self._unmet[rank]
        if unmet:
            self._unmet[rank] = unmet = [one for one in unmet if not (one.met or (one.over and not one.due))]
        return unmet

    def pending(self, rank: int) -> list[SimulatedWork]:
        """Those of them that are to fill buffers."""
        return [work for work in self.unmet(rank) if work.due]

    def pending_in(self, tensors: Sequence[Tensor]) -> SimulatedWork | None:
        """What the rank that has the turn has not waited for, and lies there."""
        pending = self.pending(self._scheduler.running)
        found = (work for work in pending for one in tensors for other in work.due if overlap(one, other))
        return next(found, None)

    def claims(self, tensors: Sequence[Tensor], stack: Stack) -> None:
        """What is called now fills these buffers. Raises the race where something on its way does, too."""
        if (work := self.pending_in(tensors)) is not None:
            rank = work.rank
            said = f"rank {rank} posted two receives into one buffer"
            if work.posted_as != "received":
                said = f"rank {rank} wanted two things in one buffer, of which one was {work.text}"
            self._scheduler.tell(race("received-twice", rank, said, first_posted=work.stack, second_posted=stack))

    def gives(self, communicator: Communicator, tensors: Sequence[Tensor], stack: Stack) -> None:
        """What is called now sends these. Raises the race where they have not come yet.

        A host waits for what lies on a device.
        """
        ahead = self._scheduler.ahead
        if ahead is not None and communicator.on_host and ahead.on_device.meet(tensors):
            self.catch_up()
        self.uses(tensors, stack)

    def uses(self, tensors: Sequence[Tensor], stack: Stack) -> None:
        """What is called now reads these. Raises the race where they have not come yet."""
        if (work := self.pending_in(tensors)) is not None:
            self._scheduler.tell(read_early(work, stack))

    def left(self) -> list[SimulatedWork]:
        """What the rank that has the turn has gone on without and has not come."""
        if self._scheduler.ahead is None:
            return []
        return [work for work in self._all[self._scheduler.running] if work.left and not work.over]

    def catch_up(self, *, surely: bool = True) -> None:
        """The rank that has the turn waits for all that it went on without. Not ``surely``: it may be that it need not.

        Other threads of its have nothing to wait for.
        """
        ahead = self._scheduler.ahead
        if ahead is None or not self._scheduler.in_turn:
            return
        for work in [one for one in self._all[self._scheduler.running] if one.left]:
            ahead.doubt |= not surely and not work.over
            work.catch_up()

    def asks(self, tensors: Sequence[Tensor], *, surely: bool = True) -> None:
        """The rank that has the turn asks for numbers in these, for which it waits if they lie on its device.

        Not ``surely``: it may be that it need not, wherever they lie.
        """
        ahead = self._scheduler.ahead
        self.catch_up(surely=surely and ahead is not None and ahead.on_device.meet(tensors))


def read_early(work: SimulatedWork, stack: Stack) -> Race:
    """The race of who uses what this work is to fill, here."""
    said = f"rank {work.rank} used a buffer before {work.text} had been waited for"
    return race("read-before-wait", work.rank, said, used=stack, **{work.posted_as: work.stack})
