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
    replica has all. tied_first: the stages that have copies of a tied parameter add theirs up before replicas do; else
    they do so after them. result: what the whole is cast to at last; None: to nothing else. late: losses are not
    divided before their backwards, and the whole is instead.
    """

    dtype: torch.dtype | None = None
    between: torch.dtype | None = None
    shares: tuple[tuple[int, ...], ...] = ()
    tied_first: bool = False
    result: torch.dtype | None = None
    late: bool = False

    def total(self, parts: Sequence[Gradient], order: Sequence[int], *, onto: Gradient = None) -> Gradient:
        """``onto``, and ``parts`` by microbatch, in this ``order``. None where all are."""
        return self.reduced(self.of_each(parts, order, onto=onto))

    def of_each(self, parts: Sequence[Gradient], order: Sequence[int], *, onto: Gradient = None) -> list[Gradient]:
        """The same sum of every replica; ``onto`` is in that of the first."""
        shares = [[m for m in order if m in own] for own in self.shares] or [list(order)]
        return [added([onto if number == 0 else None, *self._cast(parts, own)]) for number, own in enumerate(shares)]

    def reduced(self, sums: Sequence[Gradient]) -> Gradient:
        """What replicas make of their ``sums``."""
        if self.between is None:
            return _in(self.result, added(sums))
        whole, kept = added([_in(self.between, one) for one in sums]), sums[0]
        return _in(self.result, _in(None if kept is None else kept.dtype, whole))

    def _cast(self, parts: Sequence[Gradient], own: Sequence[int]) -> list[Gradient]:
        return [_in(self.dtype, parts[m]) for m in own]


PLAIN = Accumulation()


def _in(dtype: torch.dtype | None, one: Gradient) -> Gradient:
    return one if one is None or dtype is None else one.to(dtype)


def added(parts: Sequence[Gradient]) -> Gradient:
    """The sum from left to right, in place as autograd accumulates; a single part is lent; None if every part is."""
    given = [part for part in parts if part is not None]
    if len(given) < 2:
        return given[0] if given else None
    total = given[0] + given[1]
    for part in given[2:]:
        total.add_(part)
    return total


def added_onto(held: Sequence[Gradient]) -> Gradient:
    """What a gradient began with that ranks have in common and reduce, where each had one of ``held`` before the step.

    What all had alike is itself; else what some had is summed.
    """
    first = held[0]
    alike = first is not None and all(one is not None and torch.equal(one, first) for one in held)
    return first if alike else added(held)
