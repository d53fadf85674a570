"""Gradients of a stage as they are compared where they lie."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeproof.foreign.own_links import OwnStage
from pipeproof.foreign.unmeasured import Unmeasured
from pipeproof.judging.tolerance import Floor
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


@dataclass(frozen=True)
class AllowedOf(Unmeasured):
    """What rounding may do to a stage's gradients, measured where one is not as it was to the bit.

    ``over``: what it does to the sum over all replicas, of a parameter's name and what it does to this one's.
    """

    own: OwnStage
    names: Mapping[str, str]
    over: Callable[[str, Floor], Floor]

    def gradient(self, name: str) -> Floor:
        return self.over(name, self.own.floors.gradient_by_microbatch((self.own.stage, self.names[name])))
