"""How the gradients of microbatches are added up: by whom, and in which types."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

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
    divided before their backwards, and the whole is instead. bundles: by stage, the microbatches that are added up in
    their own type before that is cast, by their numbers in a replica; others are cast each.
    """

    dtype: torch.dtype | None = None
    between: torch.dtype | None = None
    shares: tuple[tuple[int, ...], ...] = ()
    tied_first: bool = False
    result: torch.dtype | None = None
    late: bool = False
    bundles: Mapping[int, Sequence[Sequence[int]]] = field(default_factory=dict)

    def total(self, parts: Sequence[Gradient], order: Sequence[int], *, onto: Gradient = None) -> Gradient:
        """``onto``, and ``parts`` by microbatch, in this ``order``. None where all are."""
        return self.reduced(self.of_each(parts, order, onto=onto))

    def dealt(self, shares: Sequence[Sequence[int]]) -> "Accumulation":
        """The same, where replicas have these microbatches; where one has all, it has these."""
        return replace(self, shares=tuple(map(tuple, shares))) if self.shares else self

    def of_each(
        self, parts: Sequence[Gradient], order: Sequence[int], *, onto: Gradient = None, stage: int = 0
    ) -> list[Gradient]:
        """The same sum of every replica in a ``stage``; ``onto`` is in that of the first."""
        shares = [self._cast(parts, order, own, stage) for own in self.shares or (range(len(parts)),)]
        return [added([onto if number == 0 else None, *cast]) for number, cast in enumerate(shares)]

    def reduced(self, sums: Sequence[Gradient]) -> Gradient:
        """What replicas make of their ``sums``."""
        if self.between is None:
            return _in(self.result, added(sums))
        whole, kept = added([_in(self.between, one) for one in sums]), sums[0]
        return _in(self.result, _in(None if kept is None else kept.dtype, whole))

    def _cast(self, parts: Sequence[Gradient], order: Sequence[int], own: Sequence[int], stage: int) -> list[Gradient]:
        """What is added up of a replica's ``own`` microbatches."""
        bundle = {own[k]: number for number, some in enumerate(self.bundles.get(stage, ())) for k in some}
        groups: dict[tuple[int, int], list[Gradient]] = {}
        for m in order:
            if m in own:
                groups.setdefault((-1, m) if m not in bundle else (bundle[m], 0), []).append(parts[m])
        return [_in(self.dtype, added(group)) for group in groups.values()]


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


def length_of(gradient: Tensor) -> float:
    """The 2-norm in fp64; of a complex gradient, over real and imaginary parts."""
    real = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    return float(torch.linalg.vector_norm(real, dtype=torch.float64))
