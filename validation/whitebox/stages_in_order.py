"""Order returned stages as in the model."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.sketch import Sketch
from pipeproof.whitebox.rank import ModulePart


@dataclass(frozen=True)
class Flow:
    """Digests at a module's boundary, by call: inputs (``came``), and output gradients (``returned``).

    gave: all outputs. handed: all input gradients.
    """

    came: Sequence[frozenset[bytes]] = ()
    returned: Sequence[frozenset[bytes]] = ()
    gave: frozenset[bytes] = frozenset()
    handed: frozenset[bytes] = frozenset()

    @classmethod
    def of(cls, calls: Sequence[Call]) -> Self:
        """Build from calls, without zeros, which match anything."""

        def contents(those: Iterable[Sketch]) -> frozenset[bytes]:
            return frozenset(digest for one in those if one.norm for digest in (one.digest, *one.said))

        return cls(
            [contents(call.inputs) for call in calls],
            [contents(call.output_gradients.values()) for call in calls],
            contents(one for call in calls for one in call.outputs),
            contents(one for call in calls for one in call.input_gradients.values()),
        )

    def count_given_to(self, other: Self) -> int:
        """Count calls of ``other`` on this module's outputs, and gradients that ``other`` returned."""
        forward = sum(bool(one & self.gave) for one in other.came)
        return forward + sum(bool(one & other.handed) for one in self.returned)

    def feeds(self, other: Self) -> bool:
        """True if most traffic between both goes from this module to ``other``: a stray message changes nothing."""
        votes = self.count_given_to(other)
        return 2 * votes >= max(1, len(other.came)) and votes > other.count_given_to(self)


@dataclass(frozen=True)
class PlacedStage:
    """A returned part at its place in the model; ``names`` and ``unmatched`` by parameter number.

    chunk: number on its rank.
    """

    index: int
    rank: int
    part: ModulePart
    names: Mapping[int, str]
    unmatched: Mapping[int, str]
    chunk: int = 0

    @property
    def turn(self) -> tuple[int, int]:
        """Sort key for chunks dealt to ranks in turn."""
        return self.chunk, self.rank

    @property
    def held(self) -> frozenset[str]:
        return frozenset(self.names.values())


Feeds = Callable[[PlacedStage, PlacedStage], bool]


def in_order(
    stages: Sequence[PlacedStage], names: Sequence[str], several: Callable[[], Collection[str]], feeds: Feeds
) -> tuple[PlacedStage, ...]:
    """Sort stages by parameters unique to them; stages without any come by turn.

    A parameter with ``several`` uses is never unique, even among equal stages. An empty stage follows a stage that
    ``feeds`` it, or precedes one that it feeds, otherwise comes last.
    """
    order = {name: number for number, name in enumerate(names)}
    holders: dict[str, list[frozenset[str]]] = {}
    for stage in stages:
        for name in stage.held:
            holders.setdefault(name, []).append(stage.held)
    shared = {name for name, held in holders.items() if len(set(held)) > 1}
    again = {name for name, held in holders.items() if len(held) > 1} - shared
    shared |= again.intersection(several()) if again else set()
    first = {id(one): min((order[name] for name in one.held - shared), default=None) for one in stages}
    ordered = sorted((one for one in stages if first[id(one)] is not None), key=lambda one: (first[id(one)], one.rank))
    for stage in sorted((one for one in stages if first[id(one)] is None), key=lambda one: one.turn):
        at = max((k for k, other in enumerate(ordered, start=1) if other.turn < stage.turn), default=0)
        if not stage.held:  # by its inputs, else by its outputs
            after = [k for k, one in enumerate(ordered, start=1) if feeds(one, stage)]
            before = [] if after else [k for k, one in enumerate(ordered) if feeds(stage, one)]
            at = max(after) if after else min(before, default=len(ordered))
        ordered.insert(at, stage)
    return tuple(replace(one, index=index) for index, one in enumerate(ordered))
