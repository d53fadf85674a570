"""Events of a simulated run, and the things that events share.

An event is one actor's step between two decisions: a rank until its next call of the network, or a message's move.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

Message = tuple[int, int]  # what the k-th call of a rank into the network gives or wants: rank and k
Actor = int | Message  # a rank, or a message that moves


class Touch(NamedTuple):
    """A thing that several actors touch: a buffer in flight, the state of a work, a key of the store."""

    thing: Hashable
    changes: bool


@dataclass(frozen=True)
class Event:
    """An event. ``able``: all actors that could go on. ``rivals``: actors that could have taken its effect.

    ``after``: events that made it possible.
    """

    actor: Actor
    able: tuple[Actor, ...]
    after: set[int] = field(default_factory=set)
    touches: set[Touch] = field(default_factory=set)
    rivals: set[Actor] = field(default_factory=set)

    def meets(self, other: "Event") -> bool:
        """True if the order of two events matters, apart from one enabling the other."""
        changed = {one.thing for one in self.touches if one.changes}
        touched = {one.thing for one in self.touches}
        return any(two.thing in (touched if two.changes else changed) for two in other.touches)


class Held(Protocol):
    """Tensors in flight. ``contents``: the current ones; ``differs``: whether these changed."""

    @property
    def contents(self) -> Sequence[Any]: ...
    def differs(self, contents: Sequence[Any]) -> bool: ...


class History:
    """Events of a run so far: actors report what they touch. Stays empty unless ``kept``."""

    def __init__(self, *, kept: bool) -> None:
        self.kept = kept
        self.events: list[Event] = []
        self._joined: set[Actor] = set()
        self._given: dict[Actor, dict[Message, tuple[Held, Sequence[Any]]]] = {}

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
        for message, (held, observed) in [*self._given.get(actor, {}).items()]:
            if held.differs(observed):
                self.touch(("buffer", message), changes=True)
                self.gives(message, held)

    def joins(self, rank: int) -> None:
        """Count this rank's touches from now on; the ranks' rendezvous in torch ends alike in any order."""
        self._joined.add(rank)

    def touch(self, thing: Hashable, *, changes: bool) -> None:
        """Note a touch by the current event."""
        if self.events and not (isinstance(actor := self.events[-1].actor, int) and actor not in self._joined):
            self.events[-1].touches.add(Touch(thing, changes))

    def note_need(self, event: int) -> None:
        """Note an earlier event as necessary for the current one."""
        if 0 <= event < self.now:
            self.events[-1].after.add(event)

    def rival(self, actor: Actor) -> None:
        """Note an actor that could have taken this event's effect."""
        if self.kept:
            self.events[-1].rivals.add(actor)

    def gives(self, message: Message, held: Held) -> None:
        """Watch writes of the rank to these tensors from now on."""
        if self.kept:
            self._given.setdefault(message[0], {})[message] = held, held.contents

    def takes_back(self, message: Message) -> None:
        """Stop watching: the rank knows that the message has left."""
        self._given.get(message[0], {}).pop(message, None)
