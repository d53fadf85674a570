"""Replicas: which rank works on which model copy, with which microbatches."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from pipeproof.pipeline.mesh import DATA, MODEL, PIPELINE, along
from pipeproof.pipeline.sizes import MOST_RANKS, some


class ReplicasError(ValueError):
    """Raised for impossible replicas."""


@dataclass(frozen=True)
class Replicas:
    """Replica numbers by rank: ``of[rank]``.

    together[rank]: ranks with one number hold the same stages, each all parameters or a part; empty if results must
    show it. copies[rank]: each parameter exists under each of these numbers; empty: as ``of``. sequence: mesh axis that
    splits sequences; empty if none does. in_step: axis along which ranks synchronize per microbatch, so that all need
    equally many. shares[rank]: microbatches per rank; empty: every n-th.
    """

    of: tuple[int, ...]
    microbatches: int
    together: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()
    sequence: str = ""
    in_step: str = ""
    shares: tuple[Sequence[int], ...] = ()

    @classmethod
    def along(cls, ranks: "int | Sequence[int] | Mapping[str, int]", microbatches: int) -> "Replicas":
        """Build from a rank count, replica numbers, or mesh sizes by axis, with ranks in row order.

        Raises ``ReplicasError`` for impossible values.
        """
        if type(ranks) is int:
            return cls((0,) * _check_count(ranks, ranks), microbatches)
        if not isinstance(ranks, list | tuple | range | Mapping):
            wanted = "how many, the replica of each as a list, or a mesh, its axes and their sizes"
            raise ReplicasError(f"ranks is {ranks!r}: expected {wanted}")
        if not isinstance(ranks, Mapping):
            _check_count(len(ranks), len(ranks))
            return cls(tuple(ranks), microbatches)
        if not ranks:
            raise ReplicasError("ranks is empty: expected a mesh, its axes and their sizes, e.g. {'pp': 2, 'dp': 2}")
        for axis, size in ranks.items():
            if axis not in (PIPELINE, *DATA, *MODEL):
                known = ", ".join((PIPELINE, *DATA, *MODEL))
                raise ReplicasError(f"ranks has an axis {axis!r}: expected some of {known}")
            if type(size) is not int or size < 1:
                raise ReplicasError(f"ranks has {size!r} along {axis!r}: expected how many ranks there are")
        _check_count(math.prod(ranks.values()), dict(ranks))
        return cls(
            along(ranks, DATA),
            microbatches,
            together=along(ranks, (PIPELINE,)),
            copies=along(ranks, [axis for axis in DATA if axis != "ep"]),
            sequence=next((axis for axis in ("cp", "sp") if ranks.get(axis, 1) > 1), ""),
            in_step=next((axis for axis in ("ep", "fsdp", "dp_shard") if ranks.get(axis, 1) > 1), ""),
        )

    @property
    def count(self) -> int:
        return max(self.of) + 1

    @property
    def places(self) -> tuple[int, ...]:
        """Return each rank's place in its replica. Ranks at one place hold the same stages."""
        return self.together or tuple(self.of[:rank].count(replica) for rank, replica in enumerate(self.of))

    def of_as_many(self, microbatches: int) -> "Replicas":
        """Copy for an operation with ``microbatches`` microbatches."""
        return replace(self, microbatches=microbatches)

    def share(self, rank: int) -> Sequence[int]:
        """Return the microbatches for ``rank``."""
        return self.shares[rank] if self.shares else range(self.of[rank], self.microbatches, self.count)

    @property
    def each(self) -> tuple[tuple[int, ...], ...]:
        """Return microbatches per replica."""
        first = {number: rank for rank, number in reversed([*enumerate(self.of)])}
        return tuple(tuple(self.share(first[number])) for number in range(self.count))

    def check(self) -> None:
        """Raise ``ReplicasError`` for impossible replicas."""
        if any(type(number) is not int for number in self.of) or sorted({*self.of}) != [*range(self.count)]:
            raise ReplicasError(f"ranks is {list(self.of)}: expected the number of each rank's replica, from 0 on")
        numbers = f"{some(self.microbatches, 'microbatch')} for {some(self.count, 'replica')}"
        if self.microbatches < self.count:
            raise ReplicasError(f"{numbers}: expected at least one for each")
        if self.in_step and self.microbatches % self.count:
            why = f"ranks along {self.in_step} wait for each other in every microbatch"
            raise ReplicasError(f"{numbers}: expected a multiple, because {why}")


def _check_count(count: int, said: object) -> int:
    if not 1 <= count <= MOST_RANKS:
        raise ReplicasError(f"ranks is {said}: expected at least 1, and at most {MOST_RANKS}")
    return count
