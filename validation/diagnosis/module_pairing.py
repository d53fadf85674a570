"""A parameter whose own module paired activations and output gradients wrongly, while the rest of its stage did not.

Runtimes that put weight gradients off keep both for each layer, and can take another microbatch's of either.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeproof.diagnosis.combination import alike, conclusive, fit, residual_of, select
from pipeproof.diagnosis.limits import DECIDED

Pair = tuple[int, int]  # the microbatch of the activation, and that of the output gradient


@dataclass(frozen=True)
class Paired:
    """Which pairs a gradient is the sum of: all microbatches' activations or output gradients, or not all of them."""

    pairs: tuple[Pair, ...]
    microbatches: int

    @property
    def wrong(self) -> tuple[Pair, ...]:
        """The pairs of two microbatches."""
        return tuple((i, j) for i, j in self.pairs if i != j)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Which of the two was another microbatch's; both, the likelier first, where each was used once."""
        every = list(range(self.microbatches))
        activations, gradients = (sorted(pair[side] for pair in self.pairs) == every for side in (0, 1))
        if activations == gradients:
            return ("swapped-activations", "swapped-gradients")
        return ("swapped-gradients",) if activations else ("swapped-activations",)


def paired_within(seen: Tensor, pairs: Mapping[Pair, Tensor], microbatches: int, limit: float) -> Paired | None:
    """The few of ``pairs`` that ``seen`` is the sum of, each once; None where it is no such sum, or any other will do.

    None too where each is of one microbatch: then nothing was exchanged, and what is wrong is something else.
    As many pairs as microbatches, for what was dropped or doubled shows in the rest of the stage as well.
    """
    keys = list(pairs)
    if not keys:
        return None
    target = seen.double().cpu().flatten()
    rows = torch.stack([pairs[key].double().flatten() for key in keys])
    if not bool(target.isfinite().all()) or not conclusive(
        len(target), used=microbatches, atoms=len(keys), limit=limit
    ):
        return None
    chosen = _chosen(target, rows, microbatches, limit)
    if len(chosen) != microbatches or alike(rows, chosen, limit):
        return None
    if residual_of(target, rows[chosen], [1.0] * len(chosen)) > limit:
        return None
    found = Paired(tuple(sorted(keys[k] for k in chosen)), microbatches)
    return found if found.wrong else None


def _chosen(target: Tensor, rows: Tensor, most: int, limit: float) -> list[int]:
    """The rows that ``target`` has once: by least squares over all of them, where there are equations enough."""
    if conclusive(len(target), used=len(rows), atoms=len(rows), limit=limit):
        found = fit(target, rows, limit)
        if max(found.uncertain) <= DECIDED:
            return [k for k, c in enumerate(found.coefficients) if abs(c - 1) <= DECIDED]
    return select(target, rows, goal=limit / 2 * target.norm().item(), most=most)
