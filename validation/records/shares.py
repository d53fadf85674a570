"""Parameters that several stages hold: what each stage adds up is a share of what all of them must have."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from pipeproof.diagnosis.tied import Shares, shares_of
from pipeproof.records.record import RankStage
from pipeproof.reference.accumulation import added
from pipeproof.worlds.side_store import Exchange

Copies = Mapping[int, str]  # the names of one parameter's copies, by stage
_Share = tuple[str, int]  # a parameter's first name, and a stage


@dataclass
class StageShares:
    """The shares of parameters that this rank holds copies of, from all stages that do.

    ``first``: the name that all copies of a parameter have in common. ``places``: who holds what; ``own``: the stage in
    which this rank does. Shares go through the ``exchange``, of each ``replica`` apart.
    """

    exchange: Exchange
    first: Mapping[str, str]
    places: Mapping[str, Sequence[RankStage]]
    own: Mapping[str, int]
    bound_s: float
    replica: int = 0
    given: list[str] = field(default_factory=list)
    known: dict[str, dict[int, Tensor]] = field(default_factory=dict)

    @property
    def copies(self) -> dict[str, dict[int, str]]:
        """By its first name, each parameter that several stages hold."""
        found: dict[str, dict[int, str]] = {}
        for name, places in self.places.items():
            for _, stage in places:
                found.setdefault(self.first.get(name, name), {}).setdefault(stage, name)
        return {first: names for first, names in found.items() if len(names) > 1}

    def stages_of(self, names: Iterable[str]) -> dict[str, set[int]]:
        """Of those of ``names`` that several stages hold copies of, these stages."""
        copies = self.copies
        shared = {name: self.first.get(name, name) for name in names}
        return {name: set(copies[first]) for name, first in shared.items() if first in copies}

    def join(self, sums: Mapping[str, Tensor | None] | None) -> dict[str, Tensor | None]:
        """The whole sum of each copy that this rank holds, where ``sums`` are its own; None: it has none to give.

        Every rank calls this. Raises ``RanksAbsent`` for shares that do not come.
        """
        copies = self.copies
        if not copies:
            return {}
        mine = {} if sums is None else {key: one for key, one in self._mine(copies, sums) if one is not None}
        what = "what stages add to the parameters that they share"
        there: list[list[_Share]] = self.exchange.gather(list(mine), what=what, bound_s=self.bound_s)
        every = {key for one in there for key in one}
        for key, share in mine.items():
            self.given.append(self._address(key))
            self.exchange.give(self.given[-1], share)
        whole: dict[str, Tensor | None] = {}
        for first, names in copies.items():
            held = [name for stage, name in names.items() if self.own.get(name) == stage]
            if held:
                self.known[first] = {s: self._taken((first, s), mine) for s in sorted(names) if (first, s) in every}
                whole |= dict.fromkeys(held, added(list(self.known[first].values())))
        return whole

    def looked_at(self, name: str, seen: Tensor | None, limit: float) -> Shares:
        """What this rank's copy is made of; ``limit``: what is rounding of it."""
        return shares_of((self.own[name], name), seen, self.known[self.first.get(name, name)], {}, limit)

    def clear(self) -> None:
        """Take back what was laid out."""
        self.exchange.clear(self.given)

    def _mine(
        self, copies: Mapping[str, Copies], sums: Mapping[str, Tensor | None]
    ) -> Iterator[tuple[_Share, Tensor | None]]:
        for first, names in copies.items():
            for stage, name in names.items():
                if self.own.get(name) == stage:
                    yield (first, stage), sums.get(name)

    def _taken(self, key: _Share, mine: Mapping[_Share, Tensor]) -> Tensor:
        if key in mine:
            return mine[key]
        found = self.exchange.take(self._address(key), bound_s=self.bound_s)
        return found.to(next(iter(mine.values())).device) if mine else found

    def _address(self, share: _Share) -> str:
        name, stage = share
        return f"share of {name} of stage {stage} of replica {self.replica}"
