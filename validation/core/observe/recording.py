"""A recording: the tensors at the boundaries of every stage in one operation, as values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

Site = tuple[int, str]  # one stage's copy of a parameter, by its name in the model
Gradients = Mapping[str, Tensor | None]  # of parameters, by name

# Where a tensor was seen, in the order in which data flow through a stage.
GIVEN = "input"  # what the runtime gave the stage
USED = "input of the module"  # what the module was called with
MADE = "output of the module"
OUTPUT = "output"  # what the stage handed on
LOSS = "loss"
RECEIVED = "output gradient"  # what the runtime gave the backward
KEPT = "input kept for the backward"  # the module's input once more, when the backward began
FLOWED = "output gradient of the module"  # what flowed into the module's graph
HANDED_ON = "input gradient"
LATE = "output gradient kept for W"  # the received one once more, when the second half of the backward began
FORWARD_POINTS = (GIVEN, USED, MADE, OUTPUT, LOSS)
BACKWARD_POINTS = (RECEIVED, KEPT, FLOWED, HANDED_ON, LATE)


class Point(NamedTuple):
    """A place in the flow of one microbatch: at which stage, and at which of the points above."""

    stage: int
    microbatch: int
    where: str


@dataclass(frozen=True)
class Recording:
    """What a rank's stages took and gave in one operation.

    ``tensors`` by point; ``graphs``: for each (stage, microbatch) the microbatches whose forwards its backward ran back
    through; ``adders``: by stage, the microbatches of the actions that changed its gradients, in order. ``parameters``
    are those that the operation began with.
    """

    tensors: Mapping[Point, Sequence[Tensor | None]] = field(default_factory=dict)
    graphs: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    adders: Mapping[int, Sequence[int]] = field(default_factory=dict)
    parameters: Mapping[Site, Tensor] = field(default_factory=dict)


def merged(recordings: Sequence[Recording]) -> Recording:
    """All ranks' recordings of one operation as one."""
    parts = {name: [vars(one)[name] for one in recordings] for name in vars(Recording())}
    return Recording(**{name: {k: seen for part in each for k, seen in part.items()} for name, each in parts.items()})


def of_stage(gradients: Mapping[Site, Tensor | None], stage: int) -> dict[str, Tensor | None]:
    """One stage's part of ``gradients``, by name."""
    return {name: gradient for (owner, name), gradient in gradients.items() if owner == stage}
