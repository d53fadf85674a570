"""Gradients that several ranks of a job hold: parts are put together on one of them, copies are held against others.

What ranks say of theirs, a few bytes each, goes to all. A part goes to the rank that judges the whole, through the
exchange of the check: no rank needs more than its own parts and one whole gradient. The store has all of those at once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from pipeproof.core.comparison import hold_claim
from pipeproof.core.ledger import Ledger
from pipeproof.core.observe.digest import digest
from pipeproof.core.observe.observed import Claim
from pipeproof.core.observe.recording import Site
from pipeproof.core.observe.shards import InShards, Shard, flat_shard, in_flat_parts, sized, untiled
from pipeproof.core.reason import Reason
from pipeproof.core.replicas import Replicas
from pipeproof.core.tolerance import stands_for_none
from pipeproof.records.record import RankStage, RecordError
from pipeproof.whitebox.claims import claims, whole_gradient
from pipeproof.whitebox.handed_back import FlatShard, Gradient, HandBackError, in_parts
from pipeproof.whitebox.matching import Local
from pipeproof.whitebox.rank import ModulePart
from pipeproof.worlds.side_store import Exchange

LAWS = (
    "shards",  # those of a parameter make up the whole
    "replicas",  # ranks that hold the same of a parameter have the same gradient
)


@dataclass(frozen=True)
class Said:
    """What a rank says of its gradient: where it lies in the whole (None: it has all), and its digest.

    content: None where there is no tensor. nothing: it is as good as no gradient.
    """

    shard: Shard | None
    content: bytes | None
    nothing: bool


@dataclass(frozen=True)
class Joined:
    """A gradient that ranks had in common: what must hold between them; whether it is whole now, and what it is then.

    mixed: why nothing can be said, or nothing.
    """

    name: str
    claims: tuple[Claim, ...] = ()
    complete: bool = False
    whole: Tensor | None = None
    mixed: str = ""


class HeldInCommon:
    """A rank's gradients of a step, as far as other ranks hold them too; ``places`` has all holders by name."""

    def __init__(
        self,
        exchange: Exchange,
        places: Mapping[str, Sequence[RankStage]],
        shapes: Mapping[str, tuple[int, ...]],
        *,
        bound_s: float,
    ) -> None:
        self.everybodys: list[dict[str, Said]] = []  # known of all ranks once parts are put together
        self._exchange, self._places, self._shapes, self._bound_s = exchange, places, shapes, bound_s
        self._said: dict[str, Said] = {}
        self._parts: dict[str, Tensor | None] = {}
        self._given: list[str] = []

    def take(self, name: str, given: Gradient | tuple[None, Shard]) -> tuple[bool, Tensor | None]:
        """Whether this rank has all of a gradient, and then the gradient. Of a part it keeps a copy on the CPU.

        Where it has nothing, other ranks may have flat parts.
        """
        part, shard = part_of(name, given, self._shapes[name])
        alone = len(self._places.get(name, ())) < 2
        if shard is not None and shard.is_all and (alone or not shard.flat):  # of flat ones others may have some, too
            part, shard = None if part is None else part.view(self._shapes[name]), None
        if shard is not None or not alone:
            self._said[name] = Said(shard, None if part is None else digest(part), stands_for_none(part))
        if shard is None and (part is not None or alone):
            return True, part
        self._parts[name] = part
        return False, None

    def together(self, replicas: Replicas) -> Iterator[Joined]:
        """What this rank is the first to hold, gradient by gradient. Raises ``RanksAbsent`` for parts that do not come.

        Every rank calls this once its gradients are taken, if any has others beside it.
        """
        if any(len(found) > 1 for found in self._places.values()):
            what = "the parts of gradients of the checked step"
            self.everybodys = self._exchange.gather(self._said, what=what, bound_s=self._bound_s)
        else:
            self.everybodys = [
                self._said if rank == self._exchange.rank else {} for rank in range(self._exchange.ranks)
            ]
        self._leave_out_beside_flat_parts()
        groups = list(self._groups())
        for site, ranks, _ in groups:
            self._give(site, ranks)
        for site, ranks, silent in groups:
            if ranks[0] == self._exchange.rank:
                yield self._joined(site, ranks, silent, replicas)
        self._parts.clear()

    def enter(
        self, ledger: Ledger, number: int, replicas: Replicas, judge: Callable[[str, Tensor | None], None]
    ) -> None:
        """Enter into ``ledger`` what must hold between ranks in operation ``number``; ``judge`` what is whole now."""
        mixed: dict[str, list[str]] = {}
        for one in self.together(replicas):
            if one.mixed:
                mixed.setdefault(one.mixed, []).append(one.name)
            for claim in one.claims:
                hold_claim(ledger, claim, number)
            if one.complete:
                judge(one.name, one.whole)
        for name, said in self.everybodys[self._exchange.rank].items():
            if said.shard is None and said.content is None:
                judge(name, None)
        for told, names in mixed.items():
            ledger.leave_out("shards", names, told, Reason.PARTS)

    def clear(self) -> None:
        """Take back what was laid out, once nobody asks for it any more."""
        self._exchange.clear(self._given)

    @property
    def shards(self) -> dict[str, dict[int, Shard]]:
        """Where every rank's part of a gradient lay, of those that came in parts."""
        found: dict[str, dict[int, Shard]] = {}
        for rank, said in enumerate(self.everybodys):
            for name, one in said.items():
                if one.shard is not None:
                    found.setdefault(name, {})[rank] = one.shard
        return found

    def _leave_out_beside_flat_parts(self) -> None:
        """Know that a rank has no part of a gradient of which it said nothing, at stages that lie in flat parts."""
        every = [(name, rank, stage, self.everybodys[rank]) for name, at in self._places.items() for rank, stage in at]
        shards = {(stage, said[name].shard) for name, _, stage, said in every if name in said}
        flat = {stage for stage, shard in shards if shard is not None and in_flat_parts([shard])}
        for name, _, stage, said in every:
            if stage in flat and (name not in said or (said[name].shard is None and said[name].content is None)):
                said[name] = Said(flat_shard(0, None), None, nothing=True)

    def _groups(self) -> Iterator[tuple[Site, list[int], list[int]]]:
        """Every parameter at its stage, with its ranks that said something of its gradient, and those that did not."""
        for name, found in self._places.items():
            for stage in dict.fromkeys(stage for _, stage in found):
                holders = [rank for rank, at in found if at == stage]
                ranks = [rank for rank in holders if name in self.everybodys[rank]]
                if ranks:
                    yield (stage, name), ranks, [rank for rank in holders if rank not in ranks]

    def _at(self, name: str, rank: int) -> Said:
        return self.everybodys[rank][name]

    def _count(self, name: str, rank: int) -> int:
        shard = self._at(name, rank).shard
        return 0 if shard is None else shard.count

    def _sender(self, name: str, rank: int, ranks: Sequence[int]) -> int:
        """The first of ``ranks`` that has what ``rank`` has."""
        return next(one for one in ranks if self._at(name, one) == self._at(name, rank))

    def _give(self, site: Site, ranks: Sequence[int]) -> None:
        """Lay this rank's part out where another judges it, and nobody before has the same."""
        (_, name), own = site, self._exchange.rank
        part = self._parts.get(name)
        if part is not None and own in ranks[1:] and self._sender(name, own, ranks) == own:
            self._given.append(_address(site, own))
            self._exchange.give(self._given[-1], part)

    def _taken(self, site: Site, rank: int, ranks: Sequence[int]) -> Tensor | None:
        _, name = site
        if self._at(name, rank).content is None:
            return None
        sender = self._sender(name, rank, ranks)
        if sender == self._exchange.rank:
            return self._parts[name]
        return self._exchange.take(_address(site, sender), bound_s=self._bound_s)

    def _joined(self, site: Site, ranks: Sequence[int], silent: Sequence[int], replicas: Replicas) -> Joined:
        _, name = site
        cut = [rank for rank in ranks if self._at(name, rank).shard is not None]
        if len(cut) < len(ranks) and not any(self._count(name, rank) for rank in cut):
            ranks, cut = [rank for rank in ranks if rank not in cut], []
        if not cut and not silent:
            return Joined(name, tuple(self._copies(site, ranks)))
        if cut != ranks or silent:
            said = {rank: "a part" if rank in cut else "all" for rank in ranks} | dict.fromkeys(
                silent, "nobody knows what"
            )
            told = ", ".join(f"rank {rank} has {what}" for rank, what in sorted(said.items()))
            return Joined(name, mixed=told)
        members = [(rank, self._member(site, rank, ranks)) for rank in ranks]
        tiled = not any(map(partial(self._count, name), ranks)) or not untiled([one.shards[0] for _, one in members])
        whole = whole_gradient(0, [part for _, part in members]) if tiled else None
        whole = None if whole is None else whole.view(self._shapes[name])
        return Joined(name, tuple(claims(site, 0, members, replicas)), tiled, whole)

    def _member(self, site: Site, rank: int, ranks: Sequence[int]) -> ModulePart:
        shard = self._at(site[1], rank).shard
        assert shard is not None, "of parts alone"
        return ModulePart((Local(site[1]),), (self._taken(site, rank, ranks),), shards={0: shard})

    def _copies(self, site: Site, ranks: Sequence[int]) -> Iterator[Claim]:
        """That ranks with all of a gradient have the same. Their digests tell: no gradient goes anywhere."""
        first, *others = ranks
        one = self._at(site[1], first)
        for rank in others:
            other = self._at(site[1], rank)
            same = one.content == other.content or (one.nothing and other.nothing)
            seen = (
                f"another gradient than rank {first}'s" if other.content else f"no gradient, and rank {first} has one"
            )
            yield Claim("replicas", rank, site, same, seen * (not same), f"rank {first}'s gradient, bit for bit", first)


def part_of(name: str, given: Any, shape: tuple[int, ...]) -> tuple[Tensor | None, Shard | None]:
    """What a rank has of a gradient, and where that lies in the whole; None if it has all. Raises ``RecordError``."""
    if given is None or (isinstance(given, Tensor) and not isinstance(given, InShards)):
        return given, None
    if not isinstance(given, FlatShard | InShards | tuple):
        raise RecordError(f"the gradient of {name} is a {type(given).__name__}: expected a tensor, a FlatShard or None")
    try:
        (part,), shards = in_parts([(name, given)])
    except HandBackError as error:
        raise RecordError(str(error)) from None
    return part, sized(shards, {0: shape}).get(0)


def _address(site: Site, rank: int) -> str:
    stage, name = site
    return f"part of the gradient of {name}, stage {stage}, rank {rank}"
