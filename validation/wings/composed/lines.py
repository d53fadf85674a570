"""Which ranks run a pipeline together: the lines of a step, replicas of each other or parts of one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from pipeproof.observers.calls import Call
from pipeproof.records.rank_part import Arrival, Run
from pipeproof.wings.composed.link import StageSeen

Each = TypeVar("Each")


@dataclass(frozen=True)
class RankLines:
    """The lines of ranks that ``run`` a step, of which ``rank`` is in one.

    Each line has all stages. ``data``: for every line, the first that runs the same microbatches, where such lines are
    the parts of one replica, as in tensor parallelism; else every line is a replica by itself.
    """

    run: Run = field(default_factory=lambda: Run((0,), (), (None,)))
    rank: int = 0
    data: tuple[int, ...] = (0,)

    @classmethod
    def of(cls, run: Run, rank: int, arrivals: Sequence[Arrival], *, together: int) -> Self:
        """Those of ``run``; among the ranks of so many ``together``, what is inside a stage is cut."""
        given: dict[tuple[str, ...] | None, int] = {}
        every = tuple(range(run.count))
        if together == 1:
            return cls(run, rank, every)
        pairs = [(line, one.microbatches) for line, one in zip(run.replicas, arrivals, strict=True)]
        brought = [next((own for of, own in pairs if of == line and own is not None), None) for line in every]
        data = tuple(given.setdefault(one, line) for line, one in enumerate(brought))
        alike = all(data.count(one) == together for one in data)
        return cls(run, rank, data if alike else every)

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
        """Whether it is known whose microbatches are whose."""
        return self.replicas == 1 or self.run.apart

    @property
    def own(self) -> int:
        """The number of this rank's line."""
        return self.run.replicas[self.rank]

    @property
    def replica_of_rank(self) -> list[int]:
        """The replica that each rank works on, by the number of its first line."""
        return [self.data[line] for line in self.run.replicas]

    def of_parts(self, every: Sequence[Mapping[int, StageSeen]], stage: int, count: int) -> list[tuple[Call, ...]]:
        """The last ``count`` calls of ``stage`` on each other rank of this one's replica, of what ranks gave."""
        replicas = self.replica_of_rank
        others = [rank for rank, of in enumerate(replicas) if of == replicas[self.rank] and rank != self.rank]
        calls = [every[rank][stage].calls for rank in others if stage in every[rank]]
        return [one[len(one) - count :] for one in calls if len(one) >= count]

    def of_line(self, every: Sequence[Each]) -> list[Each]:
        """Of what ranks gave those of this one's line."""
        return [one for one, line in zip(every, self.run.replicas, strict=True) if line == self.own]

    def all_pairs(self, given: Sequence[Sequence[Any] | None]) -> list[Any]:
        """The microbatches of all replicas, of those that ranks have ``given``."""
        leading = [None if self.data[line] != line else one for one, line in zip(given, self.run.replicas, strict=True)]
        return self.run.together(leading)

    def own_divisor(self, given: float | None, microbatches: int) -> float:
        """What they are divided by in a replica of so many, where gradients are averaged over replicas."""
        return float(microbatches or 1) if given is None else given / self.replicas
