"""Gradients of a stage as they are compared where they lie."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeproof.foreign.own_links import OwnStage
from pipeproof.foreign.unmeasured import Unmeasured
from pipeproof.judging.comparison import Due
from pipeproof.judging.tolerance import Floor, same_bits, unmeasured
from pipeproof.observers.shards import held_here
from pipeproof.reference.accumulation import length_of
from pipeproof.reference.step import dense

_PIECE = 1 << 18  # elements


def length_in_pieces(gradient: Tensor) -> float:
    """The 2-norm in fp64; of a large one piece by piece, for in fp64 it is twice as large."""
    pieces = torch.split(gradient.detach().reshape(-1), _PIECE)
    return length_of(gradient.detach()) if len(pieces) < 2 else math.hypot(*map(length_of, pieces))


def all_dense(gradients: Mapping[str, Any]) -> dict[str, Any]:
    """``gradients`` with all their elements."""
    return {name: dense(one) if isinstance(one, Tensor) else one for name, one in gradients.items()}


def hooked(
    names: Iterable[str], parameters: Mapping[str, Tensor], seen: Mapping[str, Any], due: Due, allowed: "AllowedOf"
) -> list[str]:
    """Those of ``names`` whose ``parameters`` have hooks on their gradients, which are not what they must be else."""
    found = []
    for name in names:
        one, wanted = seen.get(name), due.gradients[name]
        if not isinstance(one, Tensor) or wanted is None or not _has_hooks(parameters[name], one):
            continue
        here, there = one.detach(), wanted
        if not same_bits(here, there) and allowed.gradient(name).compared(here, there)[1] != "pass":
            found.append(name)
    return found


def _has_hooks(parameter: Tensor, gradient: Tensor) -> bool:
    """Whether hooks may have made ``gradient`` of another. Those that run when it is there make others of ``.grad``."""
    own = parameter.grad if parameter.is_leaf else None
    last = getattr(parameter, "_post_accumulate_grad_hooks", None) if own is not None else None
    changed = bool(last) and held_here(own).data_ptr() == gradient.data_ptr()  # type: ignore[arg-type]  # it is there
    return bool(parameter._backward_hooks) or changed


@dataclass(frozen=True)
class AllowedOf(Unmeasured):
    """What rounding may do to a stage's gradients, measured where one is not as it was to the bit.

    ``over``: what it does to the sum over all replicas, of a parameter's name and what it does to this one's.
    """

    own: OwnStage
    names: Mapping[str, str]
    over: Callable[[str, Floor], Floor]

    def gradient(self, name: str) -> Floor:
        site = self.own.stage, self.names[name]
        floor = unmeasured(self.precision) if self.own.speaks else self.own.floors.gradient_by_microbatch(site)
        return self.over(name, floor if self.own.inside is None else floor.through(self.own.inside))
