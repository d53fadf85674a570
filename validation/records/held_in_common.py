"""Gradients on several ranks of a job: join parts on one rank, compare copies with each other.

Descriptions, a few bytes each, go to all ranks. A part goes to the rank that judges the whole, through the check's
exchange: no rank needs more than its own parts and one whole gradient. The store has all parts at once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from pipeproof.whitebox.handed_back import FlatShard, Gradient, HandBackError, in_parts
from pipeproof.whitebox.matching import Local
from pipeproof.whitebox.rank import ModulePart
from pipeproof.whitebox.shared_stages import claims, whole_gradient
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
class _Shared:
    """A stage's gradient: the ranks that describe it, of which the first judges it, and the silent ones."""

    site: Site
    said: Mapping[int, Said]
    silent: Sequence[int]

    @property
    def shards(self) -> list[Shard]:
        return [one.shard for one in self.said.values() if one.shard is not None]

    def sender(self, rank: int) -> int:
        """The first rank with equal content."""
        return next(one for one, said in self.said.items() if said == self.said[rank])

    def address(self, rank: int) -> str:
        """The name under which a rank publishes its part."""
        stage, name = self.site
        return f"part of the gradient of {name}, stage {stage}, rank {rank}"

    @property
    def mixed(self) -> str:
        """Why nothing can be decided: ranks have different kinds of it; or nothing."""
        kinds = {rank: "all" if one.shard is None else "a part" for rank, one in self.said.items()}
        kinds |= dict.fromkeys(self.silent, "an unknown part")
        alike = len(set(kinds.values())) == 1
        return "" if alike else ", ".join(f"rank {rank} has {what}" for rank, what in sorted(kinds.items()))

    def equal_copies(self) -> Iterator[Claim]:
        """Claim equal gradients on ranks with whole copies, by digest: no gradient moves."""
        (first, one), *others = self.said.items()
        for rank, other in others:
            same = one.content == other.content or (one.nothing and other.nothing)
            text = (
                f"another gradient than rank {first}'s" if other.content else f"no gradient, and rank {first} has one"
            )
            expected = f"rank {first}'s gradient, bit for bit"
            yield Claim("replicas", rank, self.site, same, text * (not same), expected, first)


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
        self._exchange, self._places, self._shapes, self._bound_s = exchange, places, shapes, bound_s
        self._every: list[dict[str, Said]] = [{} for _ in range(exchange.ranks)]
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
            content = None if part is None else digest(part)
            self._every[self._exchange.rank][name] = Said(shard, content, stands_for_none(part))
        if shard is None and (part is not None or alone):
            return True, part
        self._parts[name] = part
        return False, None

    def enter(
        self, ledger: Ledger, number: int, replicas: Replicas, judge: Callable[[str, Tensor | None], None]
    ) -> None:
        """Enter claims between ranks into ``ledger`` for operation ``number``; ``judge`` whole gradients.

        Every rank calls this after ``take``. Raises ``RanksAbsent`` for missing parts.
        """
        own, mixed = self._exchange.rank, dict[str, list[str]]()
        if any(len(found) > 1 for found in self._places.values()):
            what = "the parts of gradients of the checked step"
            self._every = self._exchange.gather(self._every[own], what=what, bound_s=self._bound_s)
        shared = list(self._shared())
        for one in shared:
            part = self._parts.get(one.site[1])
            if part is not None and own in [*one.said][1:] and one.sender(own) == own:
                self._given.append(one.address(own))
                self._exchange.give(self._given[-1], part)
        for one in (one for one in shared if next(iter(one.said)) == own):
            if one.mixed:
                mixed.setdefault(one.mixed, []).append(one.site[1])
                continue
            members = [(rank, self._member(one, rank)) for rank in one.said] if one.shards else []
            for claim in claims(one.site, 0, members, replicas) if members else one.equal_copies():
                hold_claim(ledger, claim, number)
            if members and (not any(shard.count for shard in one.shards) or not find_untiled(one.shards)):
                whole = whole_gradient(0, [part for _, part in members])
                judge(one.site[1], None if whole is None else whole.view(self._shapes[one.site[1]]))
        self._parts.clear()
        for name, said in self._every[own].items():
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
        for rank, said in enumerate(self._every):
            for name, one in said.items():
                if one.shard is not None:
                    found.setdefault(name, {})[rank] = one.shard
        return found

    def _shared(self) -> Iterator[_Shared]:
        """Every described gradient at its stage. Beside flat parts, an undescribed gradient is an empty part."""
        held = [(stage, name, rank) for name, at in self._places.items() for rank, stage in at]
        shards = {(stage, self._every[rank][name].shard) for stage, name, rank in held if name in self._every[rank]}
        flat = {stage for stage, shard in shards if shard is not None and in_flat_parts([shard])}
        for stage, name, rank in held:
            said = self._every[rank].get(name)
            if stage in flat and (said is None or (said.shard is None and said.content is None)):
                self._every[rank][name] = Said(flat_shard(0, None), None, nothing=True)
        for stage, name in dict.fromkeys((stage, name) for stage, name, _ in held):
            holders = [rank for rank, at in self._places[name] if at == stage]
            parts = {rank: self._every[rank][name] for rank in holders if name in self._every[rank]}
            whole = {rank: one for rank, one in parts.items() if one.shard is None}
            if whole and not any(one.shard.count for one in parts.values() if one.shard is not None):
                parts = whole  # the others' parts are empty
            if parts:
                yield _Shared((stage, name), parts, [rank for rank in holders if name not in self._every[rank]])

    def _member(self, one: _Shared, rank: int) -> ModulePart:
        (_, name), said, sender, part = one.site, one.said[rank], one.sender(rank), None
        assert said.shard is not None, "of parts alone"
        if said.content is not None and sender == self._exchange.rank:
            part = self._parts[name]
        elif said.content is not None:
            part = self._exchange.take(one.address(sender), bound_s=self._bound_s)
        return ModulePart((Local(name),), (part,), shards={0: said.shard})


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
