"""Who has what among the ranks: lines, each of which has all stages, and peers, which have the same ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.core.observe.belongings import belongs_to_rank
from pipeproof.core.observe.calls import Call
from pipeproof.records.rank_part import Arrival, Run
from pipeproof.wings.composed.link import StageCalls

Each = TypeVar("Each")
Ranks = tuple[int, ...]
_Groups = dict[tuple[Ranks, ...], dict[Ranks, dist.ProcessGroup]]

_groups: WeakKeyDictionary[dist.ProcessGroup, _Groups] = WeakKeyDictionary()  # by the group of all ranks
belongs_to_rank(__name__, "_groups", fresh=lambda _: WeakKeyDictionary())


@dataclass(frozen=True)
class RankLines:
    """The lines of ranks that ``run`` a step, of which ``rank`` is in one.

    ``data``: for every line, the first that runs the same microbatches, where such lines are the parts of one replica,
    as in tensor parallelism; else every line is a replica by itself.
    """

    run: Run = field(default_factory=lambda: Run((0,), (), (None,)))
    rank: int = 0
    data: tuple[int, ...] = (0,)

    @classmethod
    def of(cls, run: Run, rank: int, arrivals: Sequence[Arrival], *, together: int) -> Self:
        """Those of ``run``; among the ranks of so many ``together``, what is inside a stage is cut."""
        every, brought = tuple(range(run.count)), dict[int, tuple[str, ...]]()
        for line, one in zip(run.replicas, arrivals, strict=True):
            if one.microbatches is not None:
                brought.setdefault(line, one.microbatches)
        first: dict[tuple[str, ...] | None, int] = {}
        data = tuple(first.setdefault(brought.get(line), line) for line in every)
        parts = together > 1 and all(data.count(one) == together for one in data)
        return cls(run, rank, data if parts else every)

    @property
    def count(self) -> int:
        """How many there are."""
        return self.run.count

    @property
    def replicas(self) -> int:
        """How many of the model there are."""
        return len({*self.data})

    @property
    def together(self) -> int:
        """How many lines are one replica's."""
        return self.count // self.replicas

    @property
    def split(self) -> bool:
        """Whether it is known which replica runs which microbatches."""
        return self.replicas == 1 or self.run.apart

    @property
    def own(self) -> int:
        """The number of this rank's line."""
        return self.run.replicas[self.rank]

    @property
    def replica_of_rank(self) -> list[int]:
        """The replica that each rank works on, by the number of its first line."""
        return [self.data[line] for line in self.run.replicas]

    def of_parts(self, every: Sequence[Mapping[int, StageCalls]], stage: int, count: int) -> list[tuple[Call, ...]]:
        """The last ``count`` calls of ``stage`` on each other rank of this one's replica, of what ranks gave."""
        replicas = self.replica_of_rank
        others = [rank for rank, of in enumerate(replicas) if of == replicas[self.rank] and rank != self.rank]
        calls = [every[rank][stage].calls for rank in others if stage in every[rank]]
        return [one[len(one) - count :] for one in calls if len(one) >= count]

    def of_line(self, every: Sequence[Each], line: int | None = None) -> list[Each]:
        """Of what ranks gave those of one line: this one's, if no other is asked for."""
        own = self.own if line is None else line
        return [one for one, of in zip(every, self.run.replicas, strict=True) if of == own]

    def all_pairs(self, given: Sequence[Sequence[Any] | None]) -> list[Any]:
        """The microbatches of all replicas, of those that ranks have ``given``."""
        leading = [None if self.data[line] != line else one for one, line in zip(given, self.run.replicas, strict=True)]
        return self.run.together(leading)

    def own_divisor(self, given: float | None, microbatches: int) -> float:
        """What they are divided by in a replica of so many, where gradients are averaged over replicas."""
        return float(microbatches or 1) if given is None else given / self.replicas


@dataclass(frozen=True)
class Peers:
    """The ranks with the stages that this one, ``rank``, has, and a group of the check's own among them.

    ``stages``: those of each rank. The job's messages are not touched: the group lasts as long as that of all ranks.
    """

    rank: int
    stages: Sequence[Sequence[int]]
    bound_s: float

    @property
    def ranks(self) -> Ranks:
        """They, in their order."""
        return self._with(self.stages[self.rank])

    def group(self) -> dist.ProcessGroup | None:
        """Their group; None where this is the only one. Every rank must ask for it."""
        every = tuple(dict.fromkeys(map(self._with, self.stages)))
        if all(len(ranks) < 2 for ranks in every):
            return None
        world, bound = dist.group.WORLD, timedelta(seconds=self.bound_s)
        assert world is not None, "several ranks have the same stages"
        groups = _groups.setdefault(world, {})
        if every not in groups:
            made = {ranks: dist.new_group(list(ranks), timeout=bound) for ranks in every}
            groups[every] = {ranks: group for ranks, group in made.items() if isinstance(group, dist.ProcessGroup)}
        return groups[every].get(self.ranks)

    def all_parts(self, own: Tensor, counts: Sequence[int]) -> list[Tensor]:
        """What each of them has, as long as ``counts`` say, flat; ``own``: this one's. Each of them calls this.

        It calls ``all_gather``, of bytes: not every backend takes every type.
        """
        group, flat = self.group(), own.detach().contiguous().flatten()
        if group is None:
            return [flat]
        sent = flat.new_zeros(max(counts))
        sent[: flat.numel()] = flat
        came = [torch.empty_like(sent) for _ in counts]
        dist.all_gather([one.view(torch.uint8) for one in came], sent.view(torch.uint8), group=group)
        return [one[:count] for one, count in zip(came, counts, strict=True)]

    def _with(self, those: Sequence[int]) -> Ranks:
        return tuple(rank for rank, own in enumerate(self.stages) if tuple(own) == tuple(those))
