"""Sums over ranks: over replicas, which have the same parameters, and over stages, which may share one."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.core.observe.shards import Shard, untiled
from pipeproof.core.tolerance import Floor
from pipeproof.explain.tied import Shares, shares_of
from pipeproof.reference.accumulation import added
from pipeproof.wings.composed.ranks import Peers
from pipeproof.wings.composed.rounding import length_in_pieces
from pipeproof.wings.composed.shards import OwnShards
from pipeproof.worlds.side_store import Exchange

_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}  # what not every backend adds up
_Share = tuple[str, int]  # a parameter's first name, and a stage


@dataclass(frozen=True)
class _Lengths:
    """The norms of this replica's sum, of ``every`` replica's, added up, and of the ``whole`` sum."""

    own: float
    every: float
    whole: float


@dataclass
class ReplicaSums:
    """The sums of this rank's stages over all replicas, which its ``peers`` have.

    ``own``: this rank's parameters; ``together``: how many peers have the same sum, as parts of one replica. ``hooks``:
    the names of those through which gradients are reduced. ``untiled``: the gradients that ranks have parts of which
    are not all of it, and why.
    """

    exchange: Exchange
    peers: Peers
    own: OwnShards
    together: int = 1
    hooks: Mapping[str, str] = field(default_factory=dict)
    untiled: dict[str, str] = field(default_factory=dict)
    _lengths: dict[str, _Lengths] = field(default_factory=dict)

    def summed(self, sums: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """``sums``, which are used up, over all replicas.

        Every rank calls this. It calls ``all_reduce`` for each of them.
        """
        group = self.peers.group()
        if group is None:
            self._find_untiled([self.own.gradients])
            return dict(sums)
        # Whoever raises here is missed at the gathering, which is bounded.
        lengths = {name: length_in_pieces(one) for name, one in sums.items() if one is not None}
        mine, what = (lengths, self.own.gradients), "which parameters of replicas have gradients"
        every = self.exchange.gather(mine, what=what, bound_s=self.peers.bound_s)
        given, parts = zip(*(every[rank] for rank in self.peers.ranks), strict=True)
        self._find_untiled(parts)
        found: dict[tuple[int, int], Tensor] = {}  # by stage and parameter, which may have several names
        wholes: dict[str, Tensor | None] = dict.fromkeys(sums)
        parameters, places = self.own.parameters, self.own.stages.places
        for name in sorted({name for one in given for name in one}):
            site = places[name], id(parameters[name])
            if site not in found:
                found[site] = self._reduced(group, sums.get(name), name)
            each = math.fsum(one.get(name, 0.0) for one in given) / self.together
            self._lengths[name] = _Lengths(lengths.get(name, 0.0), each, length_in_pieces(found[site]))
            wholes[name] = found[site]
        return wholes

    @property
    def replicas(self) -> int:
        """How many there are of what this rank has."""
        return len(self.peers.ranks) // self.together

    def floor(self, name: str, own: Floor) -> Floor:
        """What rounding does to the sum of all replicas, where it does ``own`` to this one's: as much to each."""
        lengths, narrow = self._lengths.get(name), self.own.reduced_in.get(name)
        own = own if narrow is None else own.through(narrow)
        if lengths is None:
            return own
        return own.of_sum(lengths.own, parts=self.replicas, whole=lengths.whole, every=lengths.every)

    def size(self, name: str, own: Tensor) -> float:
        """The norm of what this replica has summed up; ``own``: that, if it was not used up for the sum of all."""
        return self._lengths[name].own if name in self._lengths else length_in_pieces(own)

    def _find_untiled(self, parts: Sequence[Mapping[str, Shard]]) -> None:
        """Find gradients of which ``parts``, those of all peers, are not all: a rank without one has it whole.

        One of which no rank has anything is no gradient.
        """
        for name in dict.fromkeys(name for one in parts for name in one):
            if not all(name in one for one in parts):
                continue
            if not any(one[name].count for one in parts):
                del self.own.gradients[name]
            else:
                size = (math.prod(self.own.stages.shapes[name]),)
                if why := untiled([replace(one[name], shape=size) for one in parts]):
                    self.untiled[name] = why

    def _reduced(self, group: dist.ProcessGroup, own: Tensor | None, name: str) -> Tensor:
        """The sum of one parameter, of which this replica may have nothing."""
        if own is None:
            own = self.own.stages.parameters[name].new_zeros(self.own.stages.shapes[name])
        wide = own.to(_WIDE.get(own.dtype, own.dtype)).contiguous()
        dist.all_reduce(wide, group=group)
        return (wide if self.together == 1 else wide / self.together).to(own.dtype)


@dataclass
class StageShares:
    """The shares of parameters that this rank holds copies of, from all stages that do.

    ``first``: the name that all copies of a parameter have in common. ``copies``: what each stage calls a parameter
    that several hold, by its first name; ``own``: the stage in which this rank holds one, by name. Shares go through
    the ``exchange``, of each ``replica`` apart.
    """

    exchange: Exchange
    first: Mapping[str, str] = field(default_factory=dict)
    copies: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    own: Mapping[str, int] = field(default_factory=dict)
    bound_s: float = 0.0
    replica: int = 0
    given: list[str] = field(default_factory=list)
    known: dict[str, dict[int, Tensor]] = field(default_factory=dict)

    def stages_of(self, names: Iterable[str]) -> dict[str, set[int]]:
        """Of those of ``names`` that several stages hold copies of, these stages."""
        shared = {name: self.copies.get(self.first.get(name, name)) for name in names}
        return {name: {*stages} for name, stages in shared.items() if stages is not None}

    def join(self, sums: Mapping[str, Tensor | None] | None) -> dict[str, Tensor | None]:
        """The whole sum of each copy that this rank holds, where ``sums`` are its own; None: it has none to give.

        Every rank calls this. Raises ``RanksAbsent`` for shares that do not come.
        """
        if not self.copies:
            return {}
        every = [(self.first.get(name, name), stage, name) for name, stage in self.own.items()]
        here = [(first, stage, name) for first, stage, name in every if first in self.copies]
        given = {(first, stage): one for first, stage, name in here if sums and (one := sums.get(name)) is not None}
        what = "what stages add to the parameters that they share"
        there = {key for own in self.exchange.gather(list(given), what=what, bound_s=self.bound_s) for key in own}
        for key, share in given.items():
            self.given.append(self._address(key))
            self.exchange.give(self.given[-1], share)
        for first in dict.fromkeys(first for first, _, _ in here):
            stages = [stage for stage in sorted(self.copies[first]) if (first, stage) in there]
            self.known[first] = {stage: self._share((first, stage), given) for stage in stages}
        return {name: added(list(self.known[first].values())) for first, _, name in here}

    def looked_at(self, name: str, observed: Tensor | None, limit: float) -> Shares:
        """What this rank's copy is made of; ``limit``: what is rounding of it."""
        return shares_of((self.own[name], name), observed, self.known[self.first.get(name, name)], limit)

    def clear(self) -> None:
        """Take back what was laid out."""
        self.exchange.clear(self.given)

    def _share(self, key: _Share, given: Mapping[_Share, Tensor]) -> Tensor:
        if key in given:
            return given[key]
        found = self.exchange.take(self._address(key), bound_s=self.bound_s)
        return found.to(next(iter(given.values())).device) if given else found

    def _address(self, share: _Share) -> str:
        name, stage = share
        return f"share of {name} of stage {stage} of replica {self.replica}"
