"""An event of a simulated run, and what it has in common with others.

An event is what one actor does between two decisions: a rank until it calls the network again, or a message that moves.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple

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
