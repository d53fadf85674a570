"""The stages that were handed back, in the order in which the model has them."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from pipeproof.foreign.rank import Part


@dataclass(frozen=True)
class Stage:
    """A part that was handed back, at its place in the model; ``names`` and ``unmatched`` by the parameter's number."""

    index: int
    rank: int
    part: Part
    names: Mapping[int, str]
    unmatched: Mapping[int, str]


@dataclass(frozen=True)
class Row:
    """A stage that has no place in the model yet; ``chunk`` is its number on its rank."""

    chunk: int
    stage: Stage

    @property
    def turn(self) -> tuple[int, int]:
        """Where it comes if chunks are dealt to the ranks in turn."""
        return self.chunk, self.stage.rank

    @property
    def held(self) -> frozenset[str]:
        return frozenset(self.stage.names.values())


def in_order(rows: Sequence[Row], names: Sequence[str], several: Callable[[], Collection[str]]) -> list[Stage]:
    """As the model has them, by what only they hold; one all of which others hold too comes by its turn.

    A parameter that is used in ``several`` places is one that others hold too, even where they hold the same.
    """
    order = {name: number for number, name in enumerate(names)}
    holders: dict[str, list[frozenset[str]]] = {}
    for row in rows:
        for name in row.held:
            holders.setdefault(name, []).append(row.held)
    shared = {name for name, held in holders.items() if len(set(held)) > 1}
    again = {name for name, held in holders.items() if len(held) > 1} - shared
    shared |= again.intersection(several()) if again else set()
    first = {id(row): min((order[name] for name in row.held - shared), default=None) for row in rows}
    told = sorted((row for row in rows if first[id(row)] is not None), key=lambda row: (first[id(row)], row.stage.rank))
    for row in sorted((row for row in rows if first[id(row)] is None), key=lambda row: row.turn):
        at = max((k for k, other in enumerate(told, start=1) if row.held and other.turn < row.turn), default=0)
        told.insert(at if row.held else len(told), row)
    return [row.stage for row in told]
