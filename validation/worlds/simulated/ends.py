"""The ends of messages: what the network knows of each from its call on."""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from pipeproof.worlds.simulated.communicator import Communicator
from pipeproof.worlds.simulated.held import HeldTensors
from pipeproof.worlds.simulated.room import RoomSlot
from pipeproof.worlds.simulated.work import SimulatedWork

Way = tuple[Hashable, ...]  # what tells channels apart, or queues


@dataclass(eq=False)
class Batch:
    """Ends that one call posts: they run together. ``left``: how many are still to come."""

    left: int
    works: list[SimulatedWork] = field(default_factory=list)
    freed_s: dict[Way, float] = field(default_factory=dict)  # when they were the next of each of their queues


@dataclass(eq=False)
class End:
    """One end of a message. ``rank`` and ``peer`` are numbers in the communicator; no peer: from any rank."""

    communicator: Communicator
    rank: int
    peer: int | None
    tag: int
    sends: bool
    held: HeldTensors
    work: SimulatedWork
    batch: Batch
    other: "End | None" = None
    offered: bool = False
    kept: bool = False  # a message whose send has ended, by the network
    place: RoomSlot | None = None  # where it is kept, or might have been
    freed: int = -1  # the event that made it the next of its queue
    freed_s: float = 0.0

    @property
    def size_bytes(self) -> int:
        """What it holds."""
        return sum(tensor.nbytes for tensor in self.held.before)


@dataclass
class Ends:
    """The ends of one channel that have not met: there are only ever sends, or only receives."""

    sends: deque[End] = field(default_factory=deque)
    receives: deque[End] = field(default_factory=deque)
