"""Adding up microbatches' gradients: on which replica, and in which types."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

Gradient = Tensor | None


@dataclass(frozen=True)
class Accumulation:
    """Each replica adds its microbatches' gradients in turn; then the replicas' sums are added.

    dtype: of a replica's sum; None: of its addends. between: the sums' type while replicas reduce them, also for a
    single replica; None: unchanged. shares: each replica's microbatches; empty: one replica has all. tied_first: stages
    add up the copies of a tied parameter before replicas do; else after them. result: the final type; None: unchanged.
    late: losses are not divided before their backwards, and the whole is instead. bundles: by stage, microbatches added
    up in their own type before the cast, by their numbers in a replica; others are cast each.
    """

    dtype: torch.dtype | None = None
    between: torch.dtype | None = None
    shares: tuple[tuple[int, ...], ...] = ()
    tied_first: bool = False
    result: torch.dtype | None = None
    late: bool = False
    bundles: Mapping[int, Sequence[Sequence[int]]] = field(default_factory=dict)

    def dealt(self, shares: Sequence[Sequence[int]]) -> "Accumulation":
        """Give replicas these ``shares``; a single replica keeps all."""
        return replace(self, shares=tuple(map(tuple, shares))) if self.shares else self

    def of_each(
        self, parts: Sequence[Gradient], order: Sequence[int], *, onto: Gradient = None, stage: int = 0
    ) -> list[Gradient]:
        """Sum each replica's parts in a ``stage``; ``onto`` belongs to the first."""
        shares = [self._cast(parts, order, own, stage) for own in self.shares or (range(len(parts)),)]
        return [add_parts([onto if number == 0 else None, *cast]) for number, cast in enumerate(shares)]

    def reduce(self, sums: Sequence[Gradient]) -> Gradient:
        """Reduce the replicas' ``sums``."""
        if self.between is None:
            return _in(self.result, add_parts(sums))
        whole, kept = add_parts([_in(self.between, one) for one in sums]), sums[0]
        return _in(self.result, _in(None if kept is None else kept.dtype, whole))

    def _cast(self, parts: Sequence[Gradient], order: Sequence[int], own: Sequence[int], stage: int) -> list[Gradient]:
        """Cast the addends for a replica."""
        bundle = {own[k]: number for number, some in enumerate(self.bundles.get(stage, ())) for k in some}
        groups: dict[tuple[int, int], list[Gradient]] = {}
        for m in order:
            if m in own:
                groups.setdefault((-1, m) if m not in bundle else (bundle[m], 0), []).append(parts[m])
        return [_in(self.dtype, add_parts(group)) for group in groups.values()]


PLAIN = Accumulation()


def _in(dtype: torch.dtype | None, one: Gradient) -> Gradient:
    return one if one is None or dtype is None else one.to(dtype)


def add_parts(parts: Sequence[Gradient]) -> Gradient:
    """Sum from left to right, in place like autograd; a single part stays uncopied; None if every part is."""
    given = [part for part in parts if part is not None]
    if len(given) < 2:
        return given[0] if given else None
    total = given[0] + given[1]
    for part in given[2:]:
        total.add_(part)
    return total


def add_onto(held: Sequence[Gradient]) -> Gradient:
    """The initial gradient on ranks that reduce it, each with a tensor in ``held`` before the step.

    Equal ones count once; else they are summed.
    """
    first = held[0]
    alike = first is not None and all(one is not None and torch.equal(one, first) for one in held)
    return first if alike else add_parts(held)


def length_of(gradient: Tensor) -> float:
    """The 2-norm in fp64; for a complex gradient, over real and imaginary parts."""
    real = torch.view_as_real(gradient.resolve_conj()) if gradient.is_complex() else gradient
    return float(torch.linalg.vector_norm(real, dtype=torch.float64))
