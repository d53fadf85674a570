"""What is known of a stage: its calls, and what each gives when it is rerun, a link of the chain."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.recording import MADE, RECEIVED
from pipeproof.core.observe.sketch import Sketch
from pipeproof.core.observe.stack import Stack

Point = tuple[str, int]  # where at a call, and the tensor's number there


@dataclass(frozen=True)
class Link:
    """What a call gives, by where and number: the tensors that it makes, and what it hands back.

    ``received``: the gradients of outputs, but for what came from others that the stage made of them, where that did.
    ``limits``: of what is not as it was to the bit, how far rounding may put it. ``strange``: of what is another in
    each run. ``loss``: in the last stage, undivided, of this ``loss_type``, and how far its runs are ``loss_apart``.
    ``owes``: a backward, for that loss trains something. ``obstacle``: why the call cannot be rerun.
    ``mode_matters``: it was in evaluation mode, and gives something else in training mode.
    """

    gives: Mapping[Point, Sketch] = field(default_factory=dict)
    received: Mapping[int, Sketch] = field(default_factory=dict)
    limits: Mapping[Point, float] = field(default_factory=dict)
    strange: frozenset[Point] = frozenset()
    loss: float | None = None
    loss_type: torch.dtype | None = None
    loss_apart: float = 0.0
    owes: bool = False
    obstacle: str = ""
    mode_matters: bool = False

    @property
    def allowed(self) -> Mapping[Point, float]:
        """``limits``; of a call that gives something else in each run, nothing is known."""
        return dict.fromkeys(self.gives, math.inf) if self.strange else self.limits

    @property
    def closed(self) -> bool:
        """Whether what the call gives is known."""
        return not self.strange and not self.obstacle

    @property
    def endless(self) -> bool:
        """Whether it gives what is not finite, and not the same: where numbers overflow depends on their order."""
        return not self.strange and math.inf in self.limits.values()

    def is_right(self, at: Point, observed: Sketch | None) -> bool:
        """Whether what was ``observed`` there is what the call gives, but for rounding."""
        return observed is not None and observed.distance(self.gives[at]) <= self.allowed.get(at, 0.0)


@dataclass(frozen=True)
class StageCalls:
    """The calls of a stage, on its ``rank``. ``trains``: it has weights to be trained.

    ``meant``: by the microbatch that a call's inputs are of, the one that it was about all the same. ``outside``: where
    the backward of a loss was called for that came to what it gave; None where none did.
    """

    rank: int
    calls: tuple[Call, ...]
    meant: Mapping[int, int] = field(default_factory=dict)
    outside: Stack | None = None
    trains: bool = True

    def without_own(self, links: Sequence[Link]) -> "StageCalls":
        """The same, where only what came from behind the stage is the gradient of an output, as ``links`` know it."""
        pairs = zip(self.calls, links, strict=True)
        return replace(self, calls=tuple(call.without_own(link.received) for call, link in pairs))


def observed_at(call: Call, at: Point) -> Sketch | None:
    """What passed there in ``call``; None if nothing did."""
    where, number = at
    if where == MADE:
        return call.outputs[number] if number < len(call.outputs) else None
    return (call.output_gradients if where == RECEIVED else call.input_gradients).get(number)
