"""Distribution over ranks: a line holds all stages; peers hold the same stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.per_rank_globals import belongs_to_rank
from pipeproof.records.rank_part import Arrival, Run
from pipeproof.wings.composed.link import StageCalls

Each = TypeVar("Each")
Ranks = tuple[int, ...]
_Groups = dict[tuple[Ranks, ...], dict[Ranks, dist.ProcessGroup]]

_groups: WeakKeyDictionary[dist.ProcessGroup, _Groups] = WeakKeyDictionary()  # by the group of all ranks
belongs_to_rank(__name__, "_groups", fresh=lambda _: WeakKeyDictionary())


@dataclass(frozen=True)
class RankLines:
    """Lines of ranks that ``run`` a step; ``rank`` is in one line.

    ``data``: for every line, the first line with the same microbatches. Such lines are parts of one replica, as in
    tensor parallelism; otherwise every line is a replica.
    """

    run: Run = field(default_factory=lambda: Run((0,), (), (None,)))
    rank: int = 0
    data: tuple[int, ...] = (0,)

    @classmethod
    def of(cls, run: Run, rank: int, arrivals: Sequence[Arrival], *, together: int) -> Self:
        """Build the lines of ``run``; ``together`` ranks share a stage that is cut inside."""
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
        """Number of lines."""
        return self.run.count

    @property
    def replicas(self) -> int:
        """Number of replicas of the model."""
        return len({*self.data})

    @property
    def together(self) -> int:
        """Number of lines in a replica."""
        return self.count // self.replicas

    @property
    def split(self) -> bool:
        """True if the split of microbatches among replicas is known."""
        return self.replicas == 1 or self.run.apart

    @property
    def own(self) -> int:
        """Number of this rank's line."""
        return self.run.replicas[self.rank]

    @property
    def replica_of_rank(self) -> list[int]:
        """The replica of each rank, by the number of its first line."""
        return [self.data[line] for line in self.run.replicas]

    def of_parts(self, every: Sequence[Mapping[int, StageCalls]], stage: int, count: int) -> list[tuple[Call, ...]]:
        """Return the last ``count`` calls of ``stage`` on each other rank in this replica."""
        replicas = self.replica_of_rank
        others = [rank for rank, of in enumerate(replicas) if of == replicas[self.rank] and rank != self.rank]
        calls = [every[rank][stage].calls for rank in others if stage in every[rank]]
        return [one[len(one) - count :] for one in calls if len(one) >= count]

    def of_line(self, every: Sequence[Each], line: int | None = None) -> list[Each]:
        """Select one line's entries from all ranks' entries; by default this rank's line."""
        own = self.own if line is None else line
        return [one for one, of in zip(every, self.run.replicas, strict=True) if of == own]

    def all_pairs(self, given: Sequence[Sequence[Any] | None]) -> list[Any]:
        """Join the microbatches of all replicas, ``given`` by ranks."""
        leading = [None if self.data[line] != line else one for one, line in zip(given, self.run.replicas, strict=True)]
        return self.run.together(leading)

    def own_divisor(self, given: float | None, microbatches: int) -> float:
        """Return a replica's divisor for this many microbatches, when gradients are averaged over replicas."""
        return float(microbatches or 1) if given is None else given / self.replicas


@dataclass(frozen=True)
class Peers:
    """The ranks with the same stages as this ``rank``, and a process group for the check.

    ``stages``: each rank's. The group is separate from the job's, and lasts as long as the group over all ranks.
    """

    rank: int
    stages: Sequence[Sequence[int]]
    bound_s: float

    @property
    def ranks(self) -> Ranks:
        """The peers, in order."""
        return self._with(self.stages[self.rank])

    def group(self) -> dist.ProcessGroup | None:
        """Process group over the peers; None for a single peer. Every rank must ask for it."""
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
        """Gather every peer's flat part, with lengths ``counts``; ``own``: this rank's part. Every peer calls this.

        It calls ``all_gather`` with bytes, because some backends lack some types.
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
