"""Replicas of stages: what each adds up is summed over all of them, in groups of the check's own.

The job's messages are not touched: ranks with the same stages have a group for this, which lasts as long as that of all
ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.foreign.crossings import near
from pipeproof.judging.cause import Cause
from pipeproof.observers.sketch import Sketch, sketch
from pipeproof.worlds.belongings import belongs_to_rank
from pipeproof.worlds.side_store import Exchange

_WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}  # what not every backend adds up
Ranks = tuple[int, ...]

_Groups = dict[tuple[Ranks, ...], dict[Ranks, dist.ProcessGroup]]

_groups: WeakKeyDictionary[dist.ProcessGroup, _Groups] = WeakKeyDictionary()  # by the group of all ranks
belongs_to_rank(__name__, "_groups", fresh=lambda _: WeakKeyDictionary())


@dataclass
class ReplicaSums:
    """The sums of this rank's stages over all replicas.

    ``stages``: those of each rank; ``parameters``: this rank's. ``alone``: what this replica alone adds up, in a few
    numbers.
    """

    exchange: Exchange
    stages: Sequence[Sequence[int]]
    parameters: Mapping[str, Tensor]
    bound_s: float
    alone: dict[str, Sketch] = field(default_factory=dict)

    def summed(self, sums: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """``sums``, which are used up, over all replicas.

        Every rank calls this. It calls ``all_reduce`` for each of them.
        """
        group = self._group()
        if group is None:
            return dict(sums)
        for name, one in sums.items():  # whoever raises here is missed at the gathering, which is bounded
            if one is not None:
                self.alone[name] = sketch(one)
        what = "which parameters of replicas have gradients"
        there: list[dict[str, bool]] = self.exchange.gather(
            {name: one is not None for name, one in sums.items()}, what=what, bound_s=self.bound_s
        )
        given = sorted({name for rank in self._peers for name, has in there[rank].items() if has})
        return {**dict.fromkeys(sums), **{name: self._reduced(group, sums.get(name), name) for name in given}}

    def causes(
        self, stage: int, wrong: Mapping[str, tuple[Tensor | None, Tensor | None]], scale: float
    ) -> Iterator[Cause]:
        """What is wrong with gradients of a stage, each with what is due of it, where that is one thing for all.

        Both are as they are before sums are divided by ``scale``.
        """
        at, factors = Cause("not-reduced", rank=self.exchange.rank, stage=stage), set[float | None]()
        pairs = {
            name: (sketch(seen), sketch(due))
            for name, (due, seen) in wrong.items()
            if due is not None and seen is not None
        }
        if not pairs or len(pairs) < len(wrong):
            return
        own = {name: seen.factor(self.alone[name]) for name, (seen, _) in pairs.items() if name in self.alone}
        if len(own) == len(pairs) and all(near(one, 1.0) or near(one, scale) for one in own.values()):
            yield replace(at, detail="its gradients are those of its own microbatches alone")
            return
        for seen, due in pairs.values():
            factor = seen.factor(due)
            factors.add(None if factor is None else float(f"{factor:.4g}"))
        if len(factors) == 1 and (factor := factors.pop()) is not None:
            yield replace(at, kind="scale", factor=factor, detail=f"{factor:g} times")

    @property
    def _peers(self) -> Ranks:
        """The ranks with the stages that this one has."""
        mine = tuple(self.stages[self.exchange.rank])
        return tuple(rank for rank, own in enumerate(self.stages) if tuple(own) == mine)

    def _reduced(self, group: dist.ProcessGroup, own: Tensor | None, name: str) -> Tensor:
        """The sum of one parameter, of which this replica may have nothing."""
        if own is None:
            own = torch.zeros_like(self.parameters[name])
        wide = own.to(_WIDE.get(own.dtype, own.dtype)).contiguous()
        dist.all_reduce(wide, group=group)
        return wide.to(own.dtype)

    def _group(self) -> dist.ProcessGroup | None:
        """The group of the ranks with the same stages; None where this is the only one."""
        every = tuple(dict.fromkeys(self._all_peers()))
        if all(len(ranks) < 2 for ranks in every):
            return None
        world, bound = dist.group.WORLD, timedelta(seconds=self.bound_s)
        assert world is not None, "several ranks have the same stages"
        groups = _groups.setdefault(world, {})
        if every not in groups:
            made = {ranks: dist.new_group(list(ranks), timeout=bound) for ranks in every}
            groups[every] = {ranks: group for ranks, group in made.items() if isinstance(group, dist.ProcessGroup)}
        return groups[every].get(self._peers)

    def _all_peers(self) -> list[Ranks]:
        return [tuple(r for r, own in enumerate(self.stages) if tuple(own) == tuple(one)) for one in self.stages]
