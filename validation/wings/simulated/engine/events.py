"""Events of a simulated run, and the things that events share.

An event is one actor's step between two decisions: a rank until its next call of the network, or a message's move.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

Message = tuple[int, int]  # what the k-th call of a rank into the network gives or wants: rank and k
Actor = int | Message  # a rank, or a message that moves


@dataclass(frozen=True)
class Event:
    """An event. ``able``: all actors that could go on. ``rivals``: actors that could have taken its effect.

    ``after``: events that made it possible. ``touches``: things that several actors touch, such as a buffer in flight,
    the state of a work, a key of the store, and whether it changed them.
    """

    actor: Actor
    able: tuple[Actor, ...]
    after: set[int] = field(default_factory=set)
    touches: dict[Hashable, bool] = field(default_factory=dict)
    rivals: set[Actor] = field(default_factory=set)

    def meets(self, other: "Event") -> bool:
        """True if the order of two events matters, apart from one enabling the other."""
        both = self.touches.keys() & other.touches.keys()
        return any(self.touches[thing] or other.touches[thing] for thing in both)


class History:
    """Events of a run so far: actors report what they touch. Stays empty unless ``kept``."""

    def __init__(self, *, kept: bool) -> None:
        self.kept = kept
        self.events: list[Event] = []
        self._joined: set[Actor] = set()
        self._given: dict[Actor, dict[Message, Callable[[], bool]]] = {}

    @property
    def now(self) -> int:
        """Number of the current event."""
        return len(self.events) - 1 if self.kept else 0

    def begin(self, actor: Actor, able: Sequence[Actor]) -> None:
        """Begin this actor's event, chosen among all able actors."""
        if self.kept:
            self.events.append(Event(actor, tuple(able)))

    def end(self) -> None:
        """End the current event, and note its rank's writes to buffers in flight."""
        if not self.events:
            return
        actor = self.events[-1].actor
        for message, written in self._given.get(actor, {}).items():
            if written():
                self.touch(("buffer", message), changes=True)

    def joins(self, rank: int) -> None:
        """Count this rank's touches from now on; the ranks' rendezvous in torch ends alike in any order."""
        self._joined.add(rank)

    def touch(self, thing: Hashable, *, changes: bool) -> None:
        """Note a touch by the current event."""
        if self.events and not (isinstance(actor := self.events[-1].actor, int) and actor not in self._joined):
            touches = self.events[-1].touches
            touches[thing] = changes or touches.get(thing, False)

    def note_need(self, event: int) -> None:
        """Note an earlier event as necessary for the current one."""
        if 0 <= event < self.now:
            self.events[-1].after.add(event)

    def rival(self, actor: Actor) -> None:
        """Note an actor that could have taken this event's effect."""
        if self.kept:
            self.events[-1].rivals.add(actor)

    def gives(self, message: Message, written: Callable[[], bool]) -> None:
        """Watch writes of the rank from now on to what it gives: whether there are any since it was last asked."""
        if self.kept:
            self._given.setdefault(message[0], {})[message] = written

    def takes_back(self, message: Message) -> None:
        """Stop watching: the rank knows that the message has left."""
        self._given.get(message[0], {}).pop(message, None)
