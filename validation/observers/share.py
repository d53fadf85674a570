"""Which replica of the model each rank works on, and which microbatches it is given."""

from dataclasses import dataclass


class ReplicasError(ValueError):
    """Replicas that cannot be."""


@dataclass(frozen=True)
class Replicas:
    """``of[rank]``: the number of the replica of the model that each rank works on."""

    of: tuple[int, ...]
    microbatches: int

    @property
    def count(self) -> int:
        return max(self.of) + 1

    def share(self, rank: int) -> range:
        """The microbatches that ``rank`` is given: every n-th of them."""
        return range(self.of[rank], self.microbatches, self.count)

    def check(self) -> None:
        """Raise ``ReplicasError`` for what cannot be."""
        if any(type(number) is not int for number in self.of) or sorted({*self.of}) != [*range(self.count)]:
            raise ReplicasError(f"ranks is {list(self.of)}: expected the number of each rank's replica, from 0 on")
        if self.microbatches % self.count:
            raise ReplicasError(
                f"{self.microbatches} microbatches for {self.count} replicas: expected a multiple, so that all get "
                "equally many"
            )
