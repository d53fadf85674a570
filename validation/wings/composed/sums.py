"""Sums over ranks: over replicas, which have the same parameters, and over stages, which may share one."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.core.observe.shards import Shard, find_untiled
from pipeproof.core.tolerance import Floor
from pipeproof.explain.tied import Shares, shares_of
from pipeproof.reference.accumulation import add_parts
from pipeproof.wings.composed.rounding import length_in_pieces
from pipeproof.wings.composed.shards import OwnShards
from pipeproof.wings.composed.start import Peers
from pipeproof.worlds.side_store import Exchange

_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}  # what not every backend adds up
_Share = tuple[str, int]  # a parameter's first name, and a stage


@dataclass
class ReplicaSums:
    """Sums of this rank's gradients over all replicas, on its ``peers``.

    ``own``: this rank's parameters. ``together``: number of peers with the same sum, as parts of a replica. ``hooks``:
    DDP's communication hooks, by name. ``untiled``: gradients whose parts leave gaps, with reasons.
    """

    exchange: Exchange
    peers: Peers
    own: OwnShards
    together: int = 1
    hooks: Mapping[str, str] = field(default_factory=dict)
    untiled: dict[str, str] = field(default_factory=dict)
    _lengths: dict[str, tuple[float, float, float]] = field(default_factory=dict)  # of this part, all parts, the whole

    def sum(self, sums: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """Sum over all replicas, consuming ``sums``.

        Every rank calls this. It calls ``all_reduce`` for each parameter.
        """
        group = self.peers.group()
        if group is None:
            self._find_untiled([self.own.gradients])
            return dict(sums)
        # The gathering, with its time limit, misses a rank that raises here.
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
                if (own := sums.get(name)) is None:  # this replica may lack one
                    own = self.own.stages.parameters[name].new_zeros(self.own.stages.shapes[name])
                wide = own.to(_WIDE.get(own.dtype, own.dtype)).contiguous()
                dist.all_reduce(wide, group=group)
                found[site] = (wide if self.together == 1 else wide / self.together).to(own.dtype)
            each = math.fsum(one.get(name, 0.0) for one in given) / self.together
            self._lengths[name] = lengths.get(name, 0.0), each, length_in_pieces(found[site])
            wholes[name] = found[site]
        return wholes

    def floor(self, name: str, own: Floor) -> Floor:
        """Scale the floor ``own`` from this replica to the sum over all: each rounds as much."""
        narrow = self.own.reduced_in.get(name)
        own = own if narrow is None else own.through(narrow)
        if name not in self._lengths:
            return own
        part, every, whole = self._lengths[name]
        return own.of_sum(part, parts=len(self.peers.ranks) // self.together, whole=whole, every=every)

    def size(self, name: str, own: Tensor) -> float:
        """Norm of this replica's sum; ``own``: the sum, unless consumed."""
        return self._lengths[name][0] if name in self._lengths else length_in_pieces(own)

    def _find_untiled(self, parts: Sequence[Mapping[str, Shard]]) -> None:
        """Find gradients whose ``parts`` on all peers leave gaps; a rank without a shard has the whole gradient.

        A gradient absent on all ranks does not count.
        """
        for name in dict.fromkeys(name for one in parts for name in one):
            if not all(name in one for one in parts):
                continue
            if not any(one[name].count for one in parts):
                del self.own.gradients[name]
            else:
                size = (math.prod(self.own.stages.shapes[name]),)
                if why := find_untiled([replace(one[name], shape=size) for one in parts]):
                    self.untiled[name] = why


@dataclass
class StageShares:
    """Shares of parameters that several stages copy, from all of these stages.

    ``first``: the common name of a parameter's copies. ``copies``: each stage's name of a copy, by the first name.
    ``own``: this rank's stage with a copy, by name. Shares pass through the ``exchange``, separately for each
    ``replica``.
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
        """Return the stages with copies, for each of ``names``."""
        shared = {name: self.copies.get(self.first.get(name, name)) for name in names}
        return {name: {*stages} for name, stages in shared.items() if stages is not None}

    def join(self, sums: Mapping[str, Tensor | None] | None) -> dict[str, Tensor | None]:
        """Return the whole sum of each local copy; ``sums``: this rank's shares, or None.

        Every rank calls this. Raises ``RanksAbsent`` for missing shares.
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
            self.known[first] = known = {}
            for stage in [stage for stage in sorted(self.copies[first]) if (first, stage) in there]:
                if (first, stage) in given:
                    known[stage] = given[first, stage]
                    continue
                share = self.exchange.take(self._address((first, stage)), bound_s=self.bound_s)
                known[stage] = share.to(next(iter(given.values())).device) if given else share
        return {name: add_parts(list(self.known[first].values())) for first, _, name in here}

    def look_at(self, name: str, observed: Tensor | None, limit: float) -> Shares:
        """Return the shares in this rank's copy; ``limit``: its rounding."""
        return shares_of((self.own[name], name), observed, self.known[self.first.get(name, name)], limit)

    def clear(self) -> None:
        """Delete published shares."""
        self.exchange.clear(self.given)

    def _address(self, share: _Share) -> str:
        name, stage = share
        return f"share of {name} of stage {stage} of replica {self.replica}"
