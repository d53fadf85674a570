"""Recordings: an operation's boundary tensors, as values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

Site = tuple[int, str]  # a stage's copy of a parameter, by model name
Gradients = Mapping[str, Tensor | None]  # by parameter name

# Observation points, in data flow order within a stage.
GIVEN = "input"  # from the runtime to the stage
USED = "input of the module"  # from the stage to its module
MADE = "output of the module"
OUTPUT = "output"  # from the stage onward
LOSS = "loss"
RECEIVED = "output gradient"  # from the runtime to the backward
KEPT = "input kept for the backward"  # the module's input again, at the backward's start
FLOWED = "output gradient of the module"  # into the module's graph
HANDED_ON = "input gradient"
LATE = "output gradient kept for W"  # the received gradient again, at the second half's start
FORWARD_POINTS = (GIVEN, USED, MADE, OUTPUT, LOSS)
BACKWARD_POINTS = (RECEIVED, KEPT, FLOWED, HANDED_ON, LATE)


class Point(NamedTuple):
    """A place in one microbatch's flow: stage and observation point."""

    stage: int
    microbatch: int
    where: str


@dataclass(frozen=True)
class Recording:
    """A rank's boundary tensors in one operation.

    tensors: by point. graphs: by (stage, microbatch), microbatches whose forward graphs its backward used. adders: by
    stage, microbatches of actions that changed gradients, in order. parameters: at the operation's start.
    """

    tensors: Mapping[Point, Sequence[Tensor | None]] = field(default_factory=dict)
    graphs: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    adders: Mapping[int, Sequence[int]] = field(default_factory=dict)
    parameters: Mapping[Site, Tensor] = field(default_factory=dict)


def merge(recordings: Sequence[Recording]) -> Recording:
    """Merge all ranks' recordings."""
    parts = {name: [vars(one)[name] for one in recordings] for name in vars(Recording())}
    return Recording(
        **{name: {k: observed for part in each for k, observed in part.items()} for name, each in parts.items()}
    )
