"""A loss that depends on more than its own microbatch, as on how many tokens count in all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeproof.reference.model import LossFn


@dataclass(frozen=True)
class LossOfAll:
    """A loss function that depends on all microbatches of the step: ``of`` makes it of their inputs and targets.

    Where a step is held against itself, inputs are None: they stay where they are.
    """

    of: Callable[[Sequence[tuple[Any, Any]]], LossFn]
