"""The composed check: what it is told."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pipeproof.foreign.reference_run import WhiteBoxError, check_builds, check_divisor, check_loss_fn
from pipeproof.reference.accumulation import PLAIN, Accumulation


@dataclass(frozen=True)
class Composed:
    """A step is held against itself, link by link, so that no rank needs more of the model than it has.

    Every rank runs its own stages again, from what they were given in the step. What a stage gave must be what it gives
    again; what one stage received must be what another sent; gradients must be the sums of what microbatches give. If
    every link holds, the step is what one device would have made.

    loss_fn: of the last stage's output and the target, a microbatch's loss, undivided. None: the last stage gives it.
    loss_divisor: the loss is divided by this before its backward. The default is the number of microbatches.
    build: makes the whole model; on the meta device, so that it takes no memory. With it, stages are to hold each of
    its parameters once. host: keep what stages were given in the host's memory, and not where they compute.
    accumulation: how gradients are added up. optimizer: this rank's. With it, weights after its step are compared with
    what a copy of it makes of the gradients, clipped to max_norm.
    """

    loss_fn: Callable[[Any, Any], Tensor] | None = None
    loss_divisor: float | None = None
    build: Callable[[], nn.Module] | None = None
    host: bool = False
    accumulation: Accumulation = PLAIN
    optimizer: Optimizer | None = None
    max_norm: float = math.inf

    def check(self) -> None:
        """Raise ``WhiteBoxError`` for what no step can be held against."""
        if self.loss_fn is not None:
            check_loss_fn(self.loss_fn)
        check_divisor(self.loss_divisor)
        if self.build is not None:
            check_builds("build", self.build)
        if self.optimizer is not None and not isinstance(self.optimizer, Optimizer):
            raise WhiteBoxError(f"optimizer is {self.optimizer!r}: expected this rank's torch.optim.Optimizer")
        if not isinstance(self.max_norm, int | float) or not self.max_norm > 0:
            raise WhiteBoxError(f"max_norm is {self.max_norm!r}: expected a number above 0")

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy of ``tensor``, where it is kept."""
        return tensor.detach().to("cpu", copy=True) if self.host else tensor.detach().clone()
