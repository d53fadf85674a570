"""Gradients of a stage as they are compared where they lie."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipeproof.core.comparison import Due
from pipeproof.core.limits import FP32, LEAD
from pipeproof.core.tolerance import Floor, lead, same_bits, unmeasured
from pipeproof.observers.shards import held_here
from pipeproof.reference.accumulation import length_of
from pipeproof.reference.step import Gradient, dense
from pipeproof.wings.composed.rerun import StageRerun
from pipeproof.wings.composed.unmeasured import Unmeasured

_PIECE = 1 << 18  # elements


def length_in_pieces(gradient: Tensor) -> float:
    """The 2-norm in fp64; of a large one piece by piece, for in fp64 it is twice as large."""
    pieces = torch.split(gradient.detach().reshape(-1), _PIECE)
    return length_of(gradient.detach()) if len(pieces) < 2 else math.hypot(*map(length_of, pieces))


def all_dense(gradients: Mapping[str, Any]) -> dict[str, Any]:
    """``gradients`` with all their elements."""
    return {name: dense(one) if isinstance(one, Tensor) else one for name, one in gradients.items()}


def differing(
    names: Iterable[str], seen: Mapping[str, Any], due: Due, allowed: "AllowedOf"
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Those of ``names`` whose gradients are not what they must be, with what was ``seen`` and what is ``due``."""
    for name in names:
        one, wanted = seen.get(name), due.gradients[name]
        if isinstance(one, Tensor) and wanted is not None and not same_bits(one.detach(), wanted):
            if allowed.gradient(name).compared(one.detach(), wanted)[1] != "pass":
                yield name, one, wanted


def has_hooks(parameter: Tensor, gradient: object) -> bool:
    """Whether hooks may have made ``gradient`` of another. Those that run when it is there make others of ``.grad``."""
    if not isinstance(gradient, Tensor):
        return False
    own = parameter.grad if parameter.is_leaf else None
    last = getattr(parameter, "_post_accumulate_grad_hooks", None) if own is not None else None
    changed = bool(last) and held_here(own).data_ptr() == gradient.data_ptr()  # type: ignore[arg-type]  # it is there
    return bool(parameter._backward_hooks) or changed


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

    def _over(self, name: str, floor: Floor) -> Floor:
        return self.over(name, floor if self.own.inside is None else floor.through(self.own.inside))
