"""How far rounding may take each value of an operation, as measured on the very run that is judged."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeproof.core.floors import Floors
from pipeproof.core.limits import Precision, precision_of
from pipeproof.core.tolerance import Floor
from pipeproof.reference.step import Site


def is_wider(seen: Tensor, due: Tensor) -> bool:
    """Whether ``seen`` is of a type that has more digits than that of ``due``."""
    alike = seen.is_floating_point() and due.is_floating_point() and seen.shape == due.shape
    return alike and torch.finfo(seen.dtype).eps < torch.finfo(due.dtype).eps


@dataclass(frozen=True)
class MeasuredFloors:
    """``Allowed`` of a comparison, by the floors of a training step.

    ``wide`` are gradients that were added up in a wider type.
    """

    floors: Floors | None
    precision: Precision
    sites: Mapping[str, Site]
    wide: Mapping[str, Tensor]

    def loss(self, microbatch: int) -> Floor:
        return self._least if self.floors is None else self.floors.loss(microbatch)

    def total(self) -> Floor:
        return self._least if self.floors is None else self.floors.total()

    def norm(self) -> Floor:
        return self._least if self.floors is None else self.floors.norm()

    def gradient(self, name: str) -> Floor:
        if name in self.wide:
            return Floor(0.0, 0.0, 0.0, precision_of(self.wide[name].dtype))
        return self._least if self.floors is None else self.floors.gradient_by_microbatch(self.sites[name])

    @property
    def _least(self) -> Floor:
        return Floor(0.0, 0.0, 0.0, self.precision)

    def update(self, name: str) -> Floor:
        if name in self.wide or self.floors is None:
            return self.gradient(name)
        return self.floors.settled(self.sites[name])
