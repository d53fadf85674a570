"""What happened in a simulated run, event by event: whoever acts says what it touches."""

from collections.abc import Hashable, Sequence

from torch import Tensor

from pipeproof.worlds.simulated.event import Actor, Event, Message, Touch
from pipeproof.worlds.simulated.held import HeldTensors
from pipeproof.worlds.simulated.races import unchanged


class History:
    """The events of a run so far."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._joined: set[Actor] = set()
        self._given: dict[Actor, dict[Message, tuple[HeldTensors, Sequence[Tensor]]]] = {}

    @property
    def now(self) -> int:
        """The number of the event in progress."""
        return len(self.events) - 1

    def begin(self, actor: Actor, able: Sequence[Actor]) -> None:
        """The next event is this actor's, of all who could go on."""
        self.events.append(Event(actor, tuple(able)))

    def end(self) -> None:
        """The event in progress has ended: what its rank wrote into what is on its way is noted."""
        if not self.events:
            return
        actor = self.events[-1].actor
        for message, (held, seen) in [*self._given.get(actor, {}).items()]:
            if held.freed or not unchanged(held.contents, seen):
                self.touch(("buffer", message), changes=True)
                self.gives(message, held)

    def joins(self, rank: int) -> None:
        """What this rank touches counts from now on: how ranks meet is torch's own affair, and ends alike."""
        self._joined.add(rank)

    def touch(self, thing: Hashable, *, changes: bool) -> None:
        """The event in progress touches this."""
        event = self.events[-1]
        if not isinstance(event.actor, int) or event.actor in self._joined:
            event.touches.add(Touch(thing, changes))

    def needed(self, event: int) -> None:
        """The event in progress could not have come before that one."""
        if 0 <= event < self.now:
            self.events[-1].after.add(event)

    def rival(self, actor: Actor) -> None:
        """This one could have done what the event in progress does."""
        self.events[-1].rivals.add(actor)

    def gives(self, message: Message, held: HeldTensors) -> None:
        """From now on what its rank writes there is noted."""
        self._given.setdefault(message[0], {})[message] = held, held.contents

    def takes_back(self, message: Message) -> None:
        """Its rank knows that the message has left."""
        self._given.get(message[0], {}).pop(message, None)
