"""What a call of a stage gives when it is run again: a link of the chain."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pipeproof.core.limits import precision_of
from pipeproof.core.tolerance import error
from pipeproof.foreign.crossings import near
from pipeproof.observers.calls import Call
from pipeproof.observers.elements import all_finite
from pipeproof.observers.recording import MADE, RECEIVED
from pipeproof.observers.sketch import Sketch
from pipeproof.reference.step import Contribution

Point = tuple[str, int]  # where at a call, and the tensor's number there


@dataclass(frozen=True)
class Link:
    """What a call gives when it is run again, by where and number: tensors, and what flows.

    ``received``: the gradients of outputs, but for what came from others that the stage made of them, where that did.
    ``limits``: of what is not as it was to the bit, how far rounding may put it. ``strange``: of what is another each
    time that it is run. ``loss``: in the last stage, undivided, of this ``loss_type``. ``obstacle``: why it cannot be
    run. ``mode_matters``: it was in evaluation mode, and gives something else in training mode.
    """

    gives: Mapping[Point, Sketch]
    received: Mapping[int, Sketch] = field(default_factory=dict)
    limits: Mapping[Point, float] = field(default_factory=dict)
    strange: frozenset[Point] = frozenset()
    loss: float | None = None
    loss_type: torch.dtype | None = None
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


def seen_at(call: Call, at: Point) -> Sketch | None:
    """What passed there in ``call``; None if nothing did."""
    where, number = at
    if where == MADE:
        return call.outputs[number] if number < len(call.outputs) else None
    return (call.output_gradients if where == RECEIVED else call.input_gradients).get(number)


def limits_of(
    made: Mapping[Point, Tensor], by: Mapping[Point, Tensor], at: Sequence[Point], inside: torch.dtype | None
) -> dict[Point, float]:
    """How far what was seen may be from what was ``made``, by how far that is from what it is otherwise.

    inside: the narrowest type in which a stage in parts computes.
    """
    finite = {one: all_finite(made[one]) for one in at}
    return {one: _limit(made[one], by.get(one), inside) if finite[one] else math.inf for one in at}


def _limit(made: Tensor, other: Tensor | None, inside: torch.dtype | None) -> float:
    own = [precision_of(one) for one in (made.dtype, inside) if one is not None]
    precision = max(own, key=lambda one: one.unit)
    floor = 0.0 if other is None or other.shape != made.shape else error(made, other)
    return min(precision.most, max(precision.least, precision.factor * floor))


def fits(seen: Sketch, due: Sketch) -> bool:
    """Whether what was seen is what is due, but for rounding."""
    return seen.digest == due.digest or near(seen.factor(due), 1.0)


def comes_again(made: Tensor, again: Tensor | None, limit: float) -> bool:
    """Whether two runs give the same, as far as a ``limit`` says."""
    return again is not None and again.shape == made.shape and error(again, made) <= limit
