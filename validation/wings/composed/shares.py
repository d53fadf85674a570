"""Parameters that several stages hold: what each stage adds up is a share of what all of them must have."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from pipeproof.core.ledger import Ledger
from pipeproof.core.reason import Reason
from pipeproof.diagnosis.tied import Shares, shares_of
from pipeproof.observers.digest import contents
from pipeproof.observers.elements import bits
from pipeproof.observers.shards import held_here
from pipeproof.observers.sketch import FEW
from pipeproof.records.record import RankStage
from pipeproof.reference.accumulation import added
from pipeproof.reference.step import Site
from pipeproof.wings.composed.own_shards import OwnShards
from pipeproof.worlds.side_store import Exchange

Copies = Mapping[int, str]  # the names of one parameter's copies, by stage
_EQUAL = "stages {} begin with equal weights: pass build=, or say ties, which tell whether they are one"
_Share = tuple[str, int]  # a parameter's first name, and a stage


@dataclass(frozen=True)
class WeightHere:
    """What a rank has of a weight as the step begins: which part, and its digest; whether it is one number all over."""

    part: str
    digest: bytes
    constant: bool
    trains: bool = field(compare=False)


def weights_here(
    shards: OwnShards, begun: Mapping[int, Mapping[str, bytes]], first: Mapping[str, str]
) -> dict[Site, WeightHere]:
    """What this rank has of weights, by the stage and the ``first`` name of each.

    ``begun``: their digests, of those stages of which they are known already.
    """
    every = {stage: begun.get(stage) or contents(module) for stage, module in shards.own.modules.items()}
    held: dict[Site, WeightHere] = {}
    for (stage, name), (part, digest) in shards.named(every).items():
        one = shards.parameters[name]
        here = held_here(one)
        elements = bits(here).view(max(1, here.numel()), -1)  # a complex one has several words
        constant = not any(bool((some != elements[:1]).any()) for some in (elements[:FEW], elements))
        held[stage, first.get(name, name)] = WeightHere(part, digest, constant, one.requires_grad)
    return held


def enter_equal(ledger: Ledger, ranks: Iterable[Mapping[Site, WeightHere]], only: int | None = None) -> dict[str, str]:
    """Leave out of ``ledger`` the weights of all ``ranks`` that begin equal in several stages; gives why, by name.

    ``only``: the one stage whose gradients are compared, if not all are.
    """
    why: dict[str, str] = {}
    for stages, names in equal_weights(ranks).items():
        if only is None or only in stages:
            said = Reason.EQUAL_WEIGHTS.doubt(_EQUAL.format(" and ".join(map(str, stages))))
            for law in ("presence", "gradient"):
                ledger.leave_out(law, names, said)
            why |= dict.fromkeys(names, said)
    return why


def equal_weights(ranks: Iterable[Mapping[Site, WeightHere]]) -> dict[tuple[int, ...], list[str]]:
    """By stages, the names of weights that begin equal there, so that they may be one weight or several.

    ``ranks``: what each rank has, by the first name of each parameter. Norms and biases begin with one number in any
    stage: they count only between stages that have other weights in common, as copies of a module.
    """
    held: dict[Site, list[WeightHere]] = {}
    for rank in ranks:
        for site, here in rank.items():
            held.setdefault(site, []).append(here)
    first = {name: stage for stage, name in sorted(held, reverse=True)}
    groups: dict[frozenset[WeightHere], dict[str, int]] = {}
    for name, stage in sorted(first.items(), key=lambda one: one[::-1]):
        groups.setdefault(frozenset(held[stage, name]), {})[name] = stage
    training = {
        content: those
        for content, those in groups.items()
        if any(one.trains for name, stage in those.items() for one in held[stage, name])
    }
    found: dict[tuple[int, ...], list[str]] = {}
    for content, those in training.items():
        stages = tuple(sorted({*those.values()}))
        if len(stages) > 1 and not all(one.constant for one in content):
            found.setdefault(stages, []).extend(those)
    for content, those in training.items():
        for stages, names in found.items() if all(one.constant for one in content) else ():
            beside = {name: stage for name, stage in those.items() if stage in stages}
            names += beside if len({*beside.values()}) > 1 else ()
    return found


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
