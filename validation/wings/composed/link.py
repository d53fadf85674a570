"""Facts about a stage: its calls, and a link of the chain for each call's rerun."""

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
    """Results of a call's rerun, by place and number: tensors made, and gradients handed back.

    ``received``: gradients of outputs, without the part that came through other outputs. ``limits``: how far rounding
    may put what differs. ``strange``: places that differ in each run. ``loss``: the last stage's, undivided, of this
    ``loss_type``; its runs are ``loss_apart``. ``owes``: the call lacks a backward, though its loss trains something.
    ``obstacle``: why the call cannot be rerun. ``mode_matters``: training mode changes its results.
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
        """Return ``limits``; infinite everywhere if the call differs in each run."""
        return dict.fromkeys(self.gives, math.inf) if self.strange else self.limits

    @property
    def closed(self) -> bool:
        """True if the call's results are known."""
        return not self.strange and not self.obstacle

    @property
    def endless(self) -> bool:
        """True if a result is infinite or NaN, and differs: order decides where numbers overflow."""
        return not self.strange and math.inf in self.limits.values()

    def is_right(self, at: Point, observed: Sketch | None) -> bool:
        """True if ``observed`` equals the call's result, up to rounding."""
        return observed is not None and observed.distance(self.gives[at]) <= self.allowed.get(at, 0.0)


@dataclass(frozen=True)
class StageCalls:
    """Calls of a stage on its ``rank``. ``trains``: it has trainable weights.

    ``meant``: the microbatch that a call was about, by the microbatch of its inputs. ``outside``: the place of a call
    to backward of a loss that reached its outputs; None without one.
    """

    rank: int
    calls: tuple[Call, ...]
    meant: Mapping[int, int] = field(default_factory=dict)
    outside: Stack | None = None
    trains: bool = True

    def without_own_gradients(self, links: Sequence[Link]) -> "StageCalls":
        """Return the calls with gradients of outputs only from later stages, according to ``links``."""
        pairs = zip(self.calls, links, strict=True)
        return replace(self, calls=tuple(call.without_own_gradients(link.received) for call, link in pairs))


def sketch_at(call: Call, at: Point) -> Sketch | None:
    """Return the tensor at a place in ``call``; None without one."""
    where, number = at
    if where == MADE:
        return call.outputs[number] if number < len(call.outputs) else None
    return (call.output_gradients if where == RECEIVED else call.input_gradients).get(number)
