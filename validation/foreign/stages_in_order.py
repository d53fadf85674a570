"""The stages that were handed back, in the order in which the model has them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeproof.foreign.rank import ModulePart


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
