"""What rounding may do to what stages give again, and to gradients as they are compared where they lie."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pipeproof.core.limits import FP32, LEAD, Precision
from pipeproof.core.tolerance import Floor, lead, same_bits, unmeasured
from pipeproof.observers.shards import held_here
from pipeproof.reference.accumulation import length_of
from pipeproof.reference.step import Gradient
from pipeproof.wings.composed.rerun import StageRerun

_PIECE = 1 << 18  # elements
_OTHER_UPDATE = 0.02  # the least fault of an update whose gradient is right, relative to it: half of it must be seen


def length_in_pieces(gradient: Tensor) -> float:
    """The 2-norm in fp64; of a large one piece by piece, for in fp64 it is twice as large."""
    pieces = torch.split(gradient.detach().reshape(-1), _PIECE)
    return length_of(gradient.detach()) if len(pieces) < 2 else math.hypot(*map(length_of, pieces))


def has_hooks(parameter: Tensor, gradient: object) -> bool:
    """Whether hooks may have made ``gradient`` of another. Those that run when it is there make others of ``.grad``."""
    if not isinstance(gradient, Tensor):
        return False
    own = parameter.grad if parameter.is_leaf else None
    last = getattr(parameter, "_post_accumulate_grad_hooks", None) if own is not None else None
    changed = bool(last) and held_here(own).data_ptr() == gradient.data_ptr()  # type: ignore[arg-type]  # it is there
    return bool(parameter._backward_hooks) or changed


@dataclass(frozen=True)
class Unmeasured:
    """What rounding may do to what was computed once more by the very same operations; ``apart``: to losses it did."""

    precision: Precision
    apart: float = field(default=0.0, kw_only=True)

    def loss(self, microbatch: int) -> Floor:
        return replace(unmeasured(self.precision), rounding=self.apart)

    def total(self) -> Floor:
        return self.loss(0)

    def norm(self) -> Floor:
        return unmeasured(self.precision)

    def gradient(self, name: str) -> Floor:
        return unmeasured(self.precision)

    def update(self, name: str) -> Floor:
        return replace(unmeasured(self.precision), fault=_OTHER_UPDATE)


@dataclass(frozen=True)
class AllowedOf(Unmeasured):
    """What rounding may do to a stage's gradients, measured where one is not as it was to the bit.

    ``over``: what it does to the sum over all replicas, of a parameter's name and what it does to this one's. ``size``:
    of its name and this replica's sum, the norm of that. ``seen`` and ``due``: the gradients by those names.
    """

    own: StageRerun
    names: Mapping[str, str]
    over: Callable[[str, Floor], Floor]
    size: Callable[[str, Tensor], float]
    seen: Mapping[str, Any]
    due: Mapping[str, Gradient]

    def gradient(self, name: str) -> Floor:
        own = self.own.gradients[self.names[name]]
        measured = None if own is None else self.own.floor(self.names[name], self.size(name, own))
        if measured is None:
            return self._over(name, unmeasured(self.precision))
        floor, seen, due = self._over(name, measured), self.seen.get(name), self.due.get(name)
        # Where there are no replicas, and all that flows is as it was, sums alone may differ. How far they lead then
        # is known of narrow types.
        apart = floor is not measured or self.own.other or floor.precision.unit <= FP32.unit
        if apart or not isinstance(seen, Tensor) or due is None or seen.shape != due.shape:
            return floor
        return replace(floor, lead=floor.led) if lead(seen.detach(), due) > LEAD * floor.precision.unit else floor

    def explains(self, name: str) -> bool:
        """Whether rounding is all that may be wrong with a gradient."""
        seen, due = self.seen.get(name), self.due.get(name)
        if not isinstance(seen, Tensor) or due is None or same_bits(seen.detach(), due):
            return True
        return self.gradient(name).compared(seen.detach(), due)[1] == "pass"

    def _over(self, name: str, floor: Floor) -> Floor:
        return self.over(name, floor if self.own.inside is None else floor.through(self.own.inside))
