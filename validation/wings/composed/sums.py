"""Sums over ranks: what each replica of a stage adds up is summed over all of them, in a group of the check's own."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from pipeproof.core.tolerance import Floor
from pipeproof.observers.shards import Shard, untiled
from pipeproof.observers.watching import Watcher
from pipeproof.records.rank_part import RankStages
from pipeproof.wings.composed.held_gradients import length_in_pieces
from pipeproof.wings.composed.peers import Peers
from pipeproof.wings.composed.shards import OwnShards
from pipeproof.worlds.side_store import Exchange

_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}  # what not every backend adds up


def hooks_of(own: RankStages, watchers: Mapping[int, Watcher]) -> dict[str, str]:
    """The communication hooks of DDP by the parameters whose gradients they reduce; ``watchers`` saw the calls."""
    found: dict[str, str] = {}
    for stage, module in own.modules.items():
        replicas = watchers[stage].replicas(module)
        if replicas is not None and (hook := _hook_of(replicas)):
            found |= {own.rename(stage, name): hook for name, _ in module.named_parameters(remove_duplicate=False)}
    return found


def _hook_of(replicas: DistributedDataParallel) -> str:
    """The name of the hook through which it reduces gradients; empty where it averages them."""
    hooks = [hook for hook, _ in replicas._comm_hooks]
    if hooks:
        name = getattr(hooks[-1], "__qualname__", type(hooks[-1]).__qualname__)
        return "" if hooks[-1] is default_hooks.allreduce_hook else name
    logged: dict[str, object] = replicas._get_ddp_logging_data()  # type: ignore[no-untyped-call]  # in torch
    built_in = str(logged.get("comm_hook", ""))
    return "" if built_in.endswith("ALLREDUCE") else built_in


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
