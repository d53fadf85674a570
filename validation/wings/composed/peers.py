"""The ranks that have the same stages, and a group of the check's own among them.

The job's messages are not touched: the group lasts as long as that of all ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from pipeproof.worlds.belongings import belongs_to_rank

Ranks = tuple[int, ...]

_Groups = dict[tuple[Ranks, ...], dict[Ranks, dist.ProcessGroup]]

_groups: WeakKeyDictionary[dist.ProcessGroup, _Groups] = WeakKeyDictionary()  # by the group of all ranks
belongs_to_rank(__name__, "_groups", fresh=lambda _: WeakKeyDictionary())


@dataclass(frozen=True)
class Peers:
    """The ranks with the stages that this one, ``rank``, has; ``stages``: those of each rank."""

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
