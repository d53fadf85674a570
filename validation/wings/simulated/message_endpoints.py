"""Ends of messages after their calls, and the room in which a network buffers messages."""

from collections import defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from pipeproof.wings.simulated.buffers import HeldTensors
from pipeproof.wings.simulated.store import Communicator
from pipeproof.wings.simulated.work import SimulatedWork


@dataclass(eq=False)
class RoomSlot:
    """A message's slot in the room: free from one time, taken until another, if known."""

    size_bytes: int
    free_s: float = 0.0
    left_s: float | None = None


class Room:
    """A number of bytes for each channel. A message larger than all is never buffered.

    Slots are returned in the order of taking. So the time of a slot depends on the times of earlier messages, and not
    on the order in which a run visits them.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._places: defaultdict[Hashable, deque[RoomSlot]] = defaultdict(deque)
        self._free_s: defaultdict[Hashable, float] = defaultdict(float)

    def __bool__(self) -> bool:
        return self._size_bytes > 0

    def holds(self, size_bytes: int) -> bool:
        """True if a message of this size fits at all."""
        return 0 < self._size_bytes >= size_bytes

    def has(self, channel: Hashable, size_bytes: int) -> bool:
        """True if a message fits now."""
        places = [*self._places[channel]]
        while places and places[0].left_s is not None:
            places.pop(0)
        return self.holds(size_bytes) and sum(one.size_bytes for one in places) + size_bytes <= self._size_bytes

    def take(self, channel: Hashable, size_bytes: int) -> RoomSlot:
        """Take the slot of the channel's next message; an oversized message waits for one too."""
        places, place = self._places[channel], RoomSlot(size_bytes)
        places.append(place)
        while len(places) > 1 and sum(one.size_bytes for one in places) > self._size_bytes:
            self._free_s[channel] = max(self._free_s[channel], places.popleft().left_s or 0.0)
        place.free_s = self._free_s[channel]
        return place


Way = tuple[Hashable, ...]  # what tells channels apart, or queues


@dataclass(eq=False)
class Batch:
    """Ends posted together by one call. ``left``: number still to come."""

    left: int
    works: list[SimulatedWork] = field(default_factory=list)
    freed_s: dict[Way, float] = field(default_factory=dict)  # time when they became next in each queue


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
    place: RoomSlot | None = None  # its slot in the room
    freed: int = -1  # the event that made it next in its queue
    freed_s: float = 0.0

    @property
    def size_bytes(self) -> int:
        """Size of its tensors."""
        return sum(tensor.nbytes for tensor in self.held.before)


@dataclass
class Ends:
    """Unmatched ends of one channel: sends alone, or receives alone."""

    sends: deque[End] = field(default_factory=deque)
    receives: deque[End] = field(default_factory=deque)
