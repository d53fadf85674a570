"""How the gradients of microbatches are added up: by whom, and in which types."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Gradient = Tensor | None


@dataclass(frozen=True)
class Accumulation:
    """A replica adds what its microbatches give, one after another; then the sums of replicas are added.

    dtype: that of a replica's sum; None: that of what it adds. between: what the sums are cast to while replicas
    reduce them, be it one replica alone; None: they are not. shares: the microbatches of each replica; empty: one
    replica has all.
    """

    dtype: torch.dtype | None = None
    between: torch.dtype | None = None
    shares: tuple[tuple[int, ...], ...] = ()

    def total(self, parts: Sequence[Gradient], order: Sequence[int], *, onto: Gradient = None) -> Gradient:
        """``onto``, and ``parts`` by microbatch, in this ``order``. None where all are."""
        shares = [[m for m in order if m in own] for own in self.shares] or [list(order)]
        sums = [added([onto if number == 0 else None, *self._cast(parts, own)]) for number, own in enumerate(shares)]
        if self.between is None:
            return added(sums)
        whole, kept = added([None if one is None else one.to(self.between) for one in sums]), sums[0]
        return whole if whole is None or kept is None else whole.to(kept.dtype)

    def _cast(self, parts: Sequence[Gradient], own: Sequence[int]) -> list[Gradient]:
        given = (parts[m] for m in own)
        return [one if one is None or self.dtype is None else one.to(self.dtype) for one in given]


PLAIN = Accumulation()


def added(parts: Sequence[Gradient]) -> Gradient:
    """The sum from left to right, in place as autograd accumulates; a single part is lent; None if every part is."""
    given = [part for part in parts if part is not None]
    if len(given) < 2:
        return given[0] if given else None
    total = given[0] + given[1]
    for part in given[2:]:
        total.add_(part)
    return total
