"""Gradients on several ranks of a job: join parts on one rank, compare copies with each other.

Descriptions, a few bytes each, go to all ranks. A part goes to the rank that judges the whole, through the check's
exchange: no rank needs more than its own parts and one whole gradient. The store has all parts at once.
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
from pipeproof.core.observe.shards import InShards, Shard, find_untiled, flat_shard, in_flat_parts, with_sizes
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
    "shards",  # a parameter's shards make up the whole
    "replicas",  # ranks that hold the same of a parameter have the same gradient
)


@dataclass(frozen=True)
class Said:
    """A rank's gradient in brief: its place in the whole (None: all), and its digest.

    content: None without a tensor. nothing: equivalent to no gradient.
    """

    shard: Shard | None
    content: bytes | None
    nothing: bool


@dataclass(frozen=True)
class Joined:
    """A gradient shared by ranks: claims between them; whether it is whole now, and its value.

    mixed: why nothing can be decided, or nothing.
    """

    name: str
    claims: tuple[Claim, ...] = ()
    complete: bool = False
    whole: Tensor | None = None
    mixed: str = ""


class HeldInCommon:
    """A rank's gradients with holders on other ranks; ``places``: all holders by name."""

    def __init__(
        self,
        exchange: Exchange,
        places: Mapping[str, Sequence[RankStage]],
        shapes: Mapping[str, tuple[int, ...]],
        *,
        bound_s: float,
    ) -> None:
        self.everybodys: list[dict[str, Said]] = []  # of all ranks, once parts are joined
        self._exchange, self._places, self._shapes, self._bound_s = exchange, places, shapes, bound_s
        self._said: dict[str, Said] = {}
        self._parts: dict[str, Tensor | None] = {}
        self._given: list[str] = []

    def take(self, name: str, given: Gradient | tuple[None, Shard]) -> tuple[bool, Tensor | None]:
        """Say if this rank has a whole gradient, and return it. Keep parts as copies on the CPU.

        A rank without any may share it with ranks that have flat parts.
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
        """Join gradients that this rank judges. Raises ``RanksAbsent`` for missing parts.

        Every rank calls this after ``take``, if any gradient has several holders.
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
                yield self._join(site, ranks, silent, replicas)
        self._parts.clear()

    def enter(
        self, ledger: Ledger, number: int, replicas: Replicas, judge: Callable[[str, Tensor | None], None]
    ) -> None:
        """Enter claims between ranks into ``ledger`` for operation ``number``; ``judge`` whole gradients."""
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
        for reason, names in mixed.items():
            ledger.leave_out("shards", names, reason, Reason.PARTS)

    def clear(self) -> None:
        """Withdraw published parts after the last request."""
        self._exchange.clear(self._given)

    @property
    def shards(self) -> dict[str, dict[int, Shard]]:
        """Place every rank's gradient part."""
        found: dict[str, dict[int, Shard]] = {}
        for rank, said in enumerate(self.everybodys):
            for name, one in said.items():
                if one.shard is not None:
                    found.setdefault(name, {})[rank] = one.shard
        return found

    def _leave_out_beside_flat_parts(self) -> None:
        """Mark a rank as empty for gradients without a description, at stages in flat parts."""
        every = [(name, rank, stage, self.everybodys[rank]) for name, at in self._places.items() for rank, stage in at]
        shards = {(stage, said[name].shard) for name, _, stage, said in every if name in said}
        flat = {stage for stage, shard in shards if shard is not None and in_flat_parts([shard])}
        for name, _, stage, said in every:
            if stage in flat and (name not in said or (said[name].shard is None and said[name].content is None)):
                said[name] = Said(flat_shard(0, None), None, nothing=True)

    def _groups(self) -> Iterator[tuple[Site, list[int], list[int]]]:
        """Every parameter at its stage, with describing ranks, and silent ranks."""
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
        """The first rank with equal content."""
        return next(one for one in ranks if self._at(name, one) == self._at(name, rank))

    def _give(self, site: Site, ranks: Sequence[int]) -> None:
        """Publish this rank's part for its judge, unless an earlier rank has the same."""
        (_, name), own = site, self._exchange.rank
        part = self._parts.get(name)
        if part is not None and own in ranks[1:] and self._sender(name, own, ranks) == own:
            self._given.append(_address(site, own))
            self._exchange.give(self._given[-1], part)

    def _take(self, site: Site, rank: int, ranks: Sequence[int]) -> Tensor | None:
        _, name = site
        if self._at(name, rank).content is None:
            return None
        sender = self._sender(name, rank, ranks)
        if sender == self._exchange.rank:
            return self._parts[name]
        return self._exchange.take(_address(site, sender), bound_s=self._bound_s)

    def _join(self, site: Site, ranks: Sequence[int], silent: Sequence[int], replicas: Replicas) -> Joined:
        _, name = site
        cut = [rank for rank in ranks if self._at(name, rank).shard is not None]
        if len(cut) < len(ranks) and not any(self._count(name, rank) for rank in cut):
            ranks, cut = [rank for rank in ranks if rank not in cut], []
        if not cut and not silent:
            return Joined(name, tuple(self._copies(site, ranks)))
        if cut != ranks or silent:
            said = {rank: "a part" if rank in cut else "all" for rank in ranks} | dict.fromkeys(
                silent, "an unknown part"
            )
            text = ", ".join(f"rank {rank} has {what}" for rank, what in sorted(said.items()))
            return Joined(name, mixed=text)
        members = [(rank, self._member(site, rank, ranks)) for rank in ranks]
        tiled = not any(map(partial(self._count, name), ranks)) or not find_untiled(
            [one.shards[0] for _, one in members]
        )
        whole = whole_gradient(0, [part for _, part in members]) if tiled else None
        whole = None if whole is None else whole.view(self._shapes[name])
        return Joined(name, tuple(claims(site, 0, members, replicas)), tiled, whole)

    def _member(self, site: Site, rank: int, ranks: Sequence[int]) -> ModulePart:
        shard = self._at(site[1], rank).shard
        assert shard is not None, "of parts alone"
        return ModulePart((Local(site[1]),), (self._take(site, rank, ranks),), shards={0: shard})

    def _copies(self, site: Site, ranks: Sequence[int]) -> Iterator[Claim]:
        """Claim equal gradients on ranks with whole copies, by digest: no gradient moves."""
        first, *others = ranks
        one = self._at(site[1], first)
        for rank in others:
            other = self._at(site[1], rank)
            same = one.content == other.content or (one.nothing and other.nothing)
            observed = (
                f"another gradient than rank {first}'s" if other.content else f"no gradient, and rank {first} has one"
            )
            yield Claim(
                "replicas", rank, site, same, observed * (not same), f"rank {first}'s gradient, bit for bit", first
            )


def part_of(name: str, given: Any, shape: tuple[int, ...]) -> tuple[Tensor | None, Shard | None]:
    """Return a rank's part of a gradient, and its place in the whole; None if whole. Raises ``RecordError``."""
    if given is None or (isinstance(given, Tensor) and not isinstance(given, InShards)):
        return given, None
    if not isinstance(given, FlatShard | InShards | tuple):
        raise RecordError(f"the gradient of {name} is a {type(given).__name__}: expected a tensor, a FlatShard or None")
    try:
        (part,), shards = in_parts([(name, given)])
    except HandBackError as error:
        raise RecordError(str(error)) from None
    return part, with_sizes(shards, {0: shape}).get(0)


def _address(site: Site, rank: int) -> str:
    stage, name = site
    return f"part of the gradient of {name}, stage {stage}, rank {rank}"
