"""What happened in a simulated run, event by event, and what events have in common.

An event is what one actor does between two decisions: a rank until it calls the network again, or a message that moves.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

Message = tuple[int, int]  # what the k-th call of a rank into the network gives or wants: rank and k
Actor = int | Message  # a rank, or a message that moves


class Touch(NamedTuple):
    """A thing that several actors touch: a buffer on its way, whether a work is done, a key of the store."""

    thing: Hashable
    changes: bool


@dataclass(frozen=True)
class Event:
    """``able``: who could have been chosen. ``rivals``: who would have done in its stead what it did.

    ``after``: the events without which it could not have been.
    """

    actor: Actor
    able: tuple[Actor, ...]
    after: set[int] = field(default_factory=set)
    touches: set[Touch] = field(default_factory=set)
    rivals: set[Actor] = field(default_factory=set)

    def meets(self, other: "Event") -> bool:
        """Whether the order of the two matters, beyond that one may have made the other possible."""
        changed = {one.thing for one in self.touches if one.changes}
        touched = {one.thing for one in self.touches}
        return any(two.thing in (touched if two.changes else changed) for two in other.touches)


class Held(Protocol):
    """What is on its way. ``contents``: what is in it now; ``differs``: whether that is not what it once was."""

    @property
    def contents(self) -> Sequence[Any]: ...
    def differs(self, contents: Sequence[Any]) -> bool: ...


class History:
    """The events of a run so far: whoever acts says what it touches. One that is not ``kept`` stays empty."""

    def __init__(self, *, kept: bool) -> None:
        self.kept = kept
        self.events: list[Event] = []
        self._joined: set[Actor] = set()
        self._given: dict[Actor, dict[Message, tuple[Held, Sequence[Any]]]] = {}

    @property
    def now(self) -> int:
        """The number of the event in progress."""
        return len(self.events) - 1 if self.kept else 0

    def begin(self, actor: Actor, able: Sequence[Actor]) -> None:
        """The next event is this actor's, of all who could go on."""
        if self.kept:
            self.events.append(Event(actor, tuple(able)))

    def end(self) -> None:
        """The event in progress has ended: what its rank wrote into what is on its way is noted."""
        if not self.events:
            return
        actor = self.events[-1].actor
        for message, (held, seen) in [*self._given.get(actor, {}).items()]:
            if held.differs(seen):
                self.touch(("buffer", message), changes=True)
                self.gives(message, held)

    def joins(self, rank: int) -> None:
        """What this rank touches counts from now on: how ranks meet is torch's own affair, and ends alike."""
        self._joined.add(rank)

    def touch(self, thing: Hashable, *, changes: bool) -> None:
        """The event in progress touches this."""
        if self.events and not (isinstance(actor := self.events[-1].actor, int) and actor not in self._joined):
            self.events[-1].touches.add(Touch(thing, changes))

    def needed(self, event: int) -> None:
        """The event in progress could not have come before that one."""
        if 0 <= event < self.now:
            self.events[-1].after.add(event)

    def rival(self, actor: Actor) -> None:
        """This one could have done what the event in progress does."""
        if self.kept:
            self.events[-1].rivals.add(actor)

    def gives(self, message: Message, held: Held) -> None:
        """From now on what its rank writes there is noted."""
        if self.kept:
            self._given.setdefault(message[0], {})[message] = held, held.contents

    def takes_back(self, message: Message) -> None:
        """Its rank knows that the message has left."""
        self._given.get(message[0], {}).pop(message, None)
