"""How a run was set up, as far as a diagnosis asks: enough to do all of it again on one device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from reference.data import Batch
from reference.model import Model
from reference.step import Recipe


@dataclass(frozen=True)
class Setup:
    """What the ranks were told to do.

    ``layers`` of each stage, ``owner``: the stage of every parameter name, ``placement``: the rank of every stage.
    ``build`` makes the model with its first weights; ``batches`` and ``max_norm`` are asked for the number of an
    operation of ``plan``.
    """

    plan: tuple[str, ...]
    layers: tuple[range, ...]
    owner: Mapping[str, int]
    placement: Sequence[int]
    ranks: int
    microbatches: int
    dtype: torch.dtype
    recipe: Recipe
    build: Callable[[], Model]
    batches: Callable[[int], list[Batch]]
    max_norm: Callable[[int], float]

    @property
    def stages(self) -> int:
        return len(self.layers)
