"""What a call of a stage gives when it is run again: a link of the chain."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pipeproof.observers.sketch import Sketch
from pipeproof.reference.step import Contribution

Point = tuple[str, int]  # where at a call, and the tensor's number there


@dataclass(frozen=True)
class Link:
    """What a call gives when it is run again, by where and number: tensors, and what flows.

    ``received``: the gradients of outputs, but for what came from others that the stage made of them, where that did.
    ``limits``: of what is not as it was to the bit, how far rounding may put it. ``strange``: of what is another each
    time that it is run. ``loss``: in the last stage, undivided. ``obstacle``: why it cannot be run.
    ``mode_matters``: it was in evaluation mode, and gives something else in training mode.
    """

    gives: Mapping[Point, Sketch]
    received: Mapping[int, Sketch] = field(default_factory=dict)
    limits: Mapping[Point, float] = field(default_factory=dict)
    strange: frozenset[Point] = frozenset()
    loss: float | None = None
    obstacle: str = ""
    mode_matters: bool = False

    @property
    def allowed(self) -> Mapping[Point, float]:
        """``limits``; of a call that gives something else each time, nothing is known."""
        return dict.fromkeys(self.gives, math.inf) if self.strange else self.limits

    @property
    def closed(self) -> bool:
        """Whether what the call gives is known."""
        return not self.strange and not self.obstacle

    @property
    def endless(self) -> bool:
        """Whether it gives what is not finite, and not the same: where numbers overflow depends on their order."""
        return not self.strange and math.inf in self.limits.values()


@dataclass(frozen=True)
class Ending:
    """What comes after the last stage: the loss of each call's output with its target, and what it is divided by."""

    loss_fn: Callable[[Any, Any], Tensor] | None
    divisor: float
    targets: Sequence[Any]

    def loss(self, output: Any, target: Any) -> Tensor:
        """The loss, undivided."""
        found = output if self.loss_fn is None else self.loss_fn(output, target)
        assert isinstance(found, Tensor), "Reference says so of a loss that is none"
        return found


@dataclass(frozen=True)
class Made:
    """One run of a call: its tensors, what flowed, and what it contributes."""

    tensors: Mapping[Point, Tensor]
    more: Mapping[int, Tensor]
    contribution: Contribution | None
