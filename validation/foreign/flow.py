"""What passes a module in digests: enough to know which module was given what another put out."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from pipeproof.observers.calls import Call
from pipeproof.observers.sketch import Sketch


@dataclass(frozen=True)
class Flow:
    """Digests of what passed a module: what ``came`` in and what was ``returned`` to its outputs, by call.

    ``gave``: all that it put out. ``handed``: all that flowed on from its inputs.
    """

    came: Sequence[frozenset[bytes]] = ()
    returned: Sequence[frozenset[bytes]] = ()
    gave: frozenset[bytes] = frozenset()
    handed: frozenset[bytes] = frozenset()

    @classmethod
    def of(cls, calls: Sequence[Call]) -> Self:
        """That of these calls; zeros are anybody's."""
        return cls(
            [_contents(call.inputs) for call in calls],
            [_contents(call.output_gradients.values()) for call in calls],
            _contents(one for call in calls for one in call.outputs),
            _contents(one for call in calls for one in call.input_gradients.values()),
        )

    def given_to(self, other: Self) -> int:
        """How often ``other`` was called on what this gave, and this was sent back what ``other`` handed on."""
        forward = sum(bool(one & self.gave) for one in other.came)
        return forward + sum(bool(one & other.handed) for one in self.returned)

    def feeds(self, other: Self) -> bool:
        """Whether most of what passed between the two went from this to ``other``: a wrong message is no way."""
        votes = self.given_to(other)
        return 2 * votes >= max(1, len(other.came)) and votes > other.given_to(self)


def _contents(those: Iterable[Sketch]) -> frozenset[bytes]:
    return frozenset(digest for one in those if one.norm for digest in (one.digest, *one.said))
