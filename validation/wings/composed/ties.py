"""Parameters that several stages hold: what each stage adds up is a share of what all of them must have."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from pipeproof.explain.tied import Shares, shares_of
from pipeproof.records.record import RankStage
from pipeproof.reference.accumulation import added
from pipeproof.worlds.side_store import Exchange

_Share = tuple[str, int]  # a parameter's first name, and a stage


def copies_of(places: Mapping[str, Sequence[RankStage]], first: Mapping[str, str]) -> dict[str, dict[int, str]]:
    """By its ``first`` name, each parameter that several stages hold: what each of them calls it, by ``places``."""
    found: dict[str, dict[int, str]] = {}
    for name, those in places.items():
        for _, stage in those:
            found.setdefault(first.get(name, name), {}).setdefault(stage, name)
    return {one: names for one, names in found.items() if len(names) > 1}


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
        """By its first name, each parameter that several stages hold: what each of them calls it."""
        return copies_of(self.places, self.first)

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
        every = [(self.first.get(name, name), stage, name) for name, stage in self.own.items()]
        here = [(first, stage, name) for first, stage, name in every if first in copies]
        given = {(first, stage): one for first, stage, name in here if sums and (one := sums.get(name)) is not None}
        what = "what stages add to the parameters that they share"
        there = {key for own in self.exchange.gather(list(given), what=what, bound_s=self.bound_s) for key in own}
        for key, share in given.items():
            self.given.append(self._address(key))
            self.exchange.give(self.given[-1], share)
        for first in dict.fromkeys(first for first, _, _ in here):
            stages = [stage for stage in sorted(copies[first]) if (first, stage) in there]
            self.known[first] = {stage: self._taken((first, stage), given) for stage in stages}
        return {name: added(list(self.known[first].values())) for first, _, name in here}

    def looked_at(self, name: str, observed: Tensor | None, limit: float) -> Shares:
        """What this rank's copy is made of; ``limit``: what is rounding of it."""
        return shares_of((self.own[name], name), observed, self.known[self.first.get(name, name)], limit)

    def clear(self) -> None:
        """Take back what was laid out."""
        self.exchange.clear(self.given)

    def _taken(self, key: _Share, given: Mapping[_Share, Tensor]) -> Tensor:
        if key in given:
            return given[key]
        found = self.exchange.take(self._address(key), bound_s=self.bound_s)
        return found.to(next(iter(given.values())).device) if given else found

    def _address(self, share: _Share) -> str:
        name, stage = share
        return f"share of {name} of stage {stage} of replica {self.replica}"
