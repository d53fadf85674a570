"""What of an operation before may be in one: calls of stages that were given what it had, and what its weights give."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from pipeproof.reference.step import Gradient


class StaleCall(NamedTuple):
    """``call``, from 1 on, of ``stage`` with a tensor that a microbatch of an ``operation`` before, from 1 on, had."""

    stage: int
    call: int
    operation: int
    microbatch: int


class Given(NamedTuple):
    """What a step gives: each microbatch's loss, what they are together, and gradients by parameter."""

    losses: Sequence[float]
    loss: float
    gradients: Mapping[str, Gradient]

    def of(self, microbatch: int | None) -> float:
        """A microbatch's loss; None: what all are together."""
        return self.loss if microbatch is None else self.losses[microbatch]


WithWeights = Callable[[Mapping[str, Tensor]], Given | None]  # None: it does not run
