"""The loss scale: what losses are multiplied by, and gradients divided by, so that those in fp16 do not vanish."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class LossScale:
    """How a step scales, as far as its scalers say so.

    losses: what losses were multiplied by before their backwards. divided: what a rank's gradients are divided by.
    skips: gradients overflow, so that every rank is to skip its step.
    ranks: what each rank divides by, where several say so.
    """

    losses: float
    divided: float
    skips: bool = False
    ranks: Mapping[int, float] = field(default_factory=dict)

    def of(self, rank: int | None) -> "LossScale":
        """The same, as ``rank`` has it."""
        divided = self.divided if rank is None else self.ranks.get(rank, self.divided)
        return self if divided == self.divided else replace(self, divided=divided)

    @property
    def over(self) -> float:
        """What is left in gradients where they are divided by another scale."""
        return self.losses / self.divided
