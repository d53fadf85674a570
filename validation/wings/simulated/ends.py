"""The ends of messages, from their calls on, and the room in which a network keeps what has not been received."""

from collections import defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from pipeproof.wings.simulated.buffers import HeldTensors
from pipeproof.wings.simulated.store import Communicator
from pipeproof.wings.simulated.work import SimulatedWork


@dataclass(eq=False)
class RoomSlot:
    """That of one message: from when on it was free, and until when it was taken, once that is known."""

    size_bytes: int
    free_s: float = 0.0
    left_s: float | None = None


class Room:
    """So many bytes for each channel. A message that is larger than all of them is never kept; without any, none is.

    It is given back in the order in which it was taken. So at what time a message has a place depends on the times of
    those before it, and not on the order in which a run comes to them.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._places: defaultdict[Hashable, deque[RoomSlot]] = defaultdict(deque)
        self._free_s: defaultdict[Hashable, float] = defaultdict(float)

    def __bool__(self) -> bool:
        return self._size_bytes > 0

    def holds(self, size_bytes: int) -> bool:
        """Whether a message of this size can ever be kept."""
        return 0 < self._size_bytes >= size_bytes

    def has(self, channel: Hashable, size_bytes: int) -> bool:
        """Whether there is a place for a message now."""
        places = [*self._places[channel]]
        while places and places[0].left_s is not None:
            places.pop(0)
        return self.holds(size_bytes) and sum(one.size_bytes for one in places) + size_bytes <= self._size_bytes

    def take(self, channel: Hashable, size_bytes: int) -> RoomSlot:
        """The place of the channel's next message; of one that is never kept, what it waits for all the same."""
        places, place = self._places[channel], RoomSlot(size_bytes)
        places.append(place)
        while len(places) > 1 and sum(one.size_bytes for one in places) > self._size_bytes:
            self._free_s[channel] = max(self._free_s[channel], places.popleft().left_s or 0.0)
        place.free_s = self._free_s[channel]
        return place


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
