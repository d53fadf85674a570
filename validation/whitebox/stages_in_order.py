"""The stages that were handed back, in the order in which the model has them."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.sketch import Sketch
from pipeproof.whitebox.rank import ModulePart


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


@dataclass(frozen=True)
class PlacedStage:
    """A part that was handed back, at its place in the model; ``names`` and ``unmatched`` by the parameter's number.

    ``chunk`` is its number on its rank.
    """

    index: int
    rank: int
    part: ModulePart
    names: Mapping[int, str]
    unmatched: Mapping[int, str]
    chunk: int = 0

    @property
    def turn(self) -> tuple[int, int]:
        """Where it comes if chunks are dealt to the ranks in turn."""
        return self.chunk, self.rank

    @property
    def held(self) -> frozenset[str]:
        return frozenset(self.names.values())


Feeds = Callable[[PlacedStage, PlacedStage], bool]


def in_order(
    stages: Sequence[PlacedStage], names: Sequence[str], several: Callable[[], Collection[str]], feeds: Feeds
) -> tuple[PlacedStage, ...]:
    """As the model has them, by what only they hold; one all of which others hold too comes by its turn.

    A parameter that is used in ``several`` places is one that others hold too, even where they hold the same. One that
    holds nothing comes where one ``feeds`` it, or it feeds one, and else last.
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
    told = sorted((one for one in stages if first[id(one)] is not None), key=lambda one: (first[id(one)], one.rank))
    for stage in sorted((one for one in stages if first[id(one)] is None), key=lambda one: one.turn):
        at = max((k for k, other in enumerate(told, start=1) if other.turn < stage.turn), default=0)
        told.insert(at if stage.held else _by_flow(stage, told, feeds), stage)
    return tuple(replace(one, index=index) for index, one in enumerate(told))


def _by_flow(stage: PlacedStage, told: Sequence[PlacedStage], feeds: Feeds) -> int:
    """Where a stage comes among those that are ``told``, by what it was given and by what it gave."""
    before = [k for k, other in enumerate(told, start=1) if feeds(other, stage)]
    return max(before) if before else min((k for k, one in enumerate(told) if feeds(stage, one)), default=len(told))
