"""The loss scale: a factor on losses, divided out of gradients, against underflow in fp16."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class LossScale:
    """A step's loss scaling, from its scalers.

    losses: the factor on losses before their backwards. divided: the divisor of a rank's gradients. skips: gradients
    overflow, so that every rank is to skip its step. ranks: each rank's divisor, if several report one.
    """

    losses: float
    divided: float
    skips: bool = False
    ranks: Mapping[int, float] = field(default_factory=dict)

    def of(self, rank: int | None) -> "LossScale":
        """The same for ``rank``."""
        divided = self.divided if rank is None else self.ranks.get(rank, self.divided)
        return self if divided == self.divided else replace(self, divided=divided)

    @property
    def over(self) -> float:
        """The factor left in gradients after division by another scale."""
        return self.losses / self.divided
