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
from pipeproof.judging.tolerance import Floor, same_bits
from pipeproof.reference.accumulation import length_of
from pipeproof.reference.step import dense

_PIECE = 1 << 18  # elements


def length_in_pieces(gradient: Tensor) -> float:
    """The 2-norm in fp64; of a large one piece by piece, for in fp64 it is twice as large."""
    pieces = torch.split(gradient.reshape(-1), _PIECE)
    return length_of(gradient) if len(pieces) < 2 else math.hypot(*map(length_of, pieces))


def all_dense(gradients: Mapping[str, Any]) -> dict[str, Any]:
    """``gradients`` with all their elements."""
    return {name: dense(one) if isinstance(one, Tensor) else one for name, one in gradients.items()}


HOOKED = "hooks on its gradient may have made another of it, and are not run again: they may speak to other ranks"


def hooked(
    names: Iterable[str], parameters: Mapping[str, Tensor], seen: Mapping[str, Any], due: Due, allowed: "AllowedOf"
) -> list[str]:
    """Those of ``names`` whose ``parameters`` have hooks on their gradients, which are not what they must be else."""
    found = []
    for name in names:
        one, wanted = seen.get(name), due.gradients[name]
        if not parameters[name]._backward_hooks or not isinstance(one, Tensor) or wanted is None:
            continue
        here, there = one.detach().cpu(), wanted.cpu()
        if not same_bits(here, there) and allowed.gradient(name).compared(here, there)[1] != "pass":
            found.append(name)
    return found


@dataclass(frozen=True)
class AllowedOf(Unmeasured):
    """What rounding may do to a stage's gradients, measured where one is not as it was to the bit.

    ``over``: what it does to the sum over all replicas, of a parameter's name and what it does to this one's.
    """

    own: OwnStage
    names: Mapping[str, str]
    over: Callable[[str, Floor], Floor]

    def gradient(self, name: str) -> Floor:
        floor = self.own.floors.gradient_by_microbatch((self.own.stage, self.names[name]))
        return self.over(name, floor if self.own.inside is None else floor.through(self.own.inside))
