"""A stage's gradients as a system of linear equations in the coefficients of atoms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from reference.step import Gradient
from validation.diagnosis.atoms import Atom, Term
from validation.diagnosis.combination import conclusive, residual_of
from validation.judging.tolerance import BF16, Floor, error, precision_of

# The law judges fp16 as fp32, and so lets nothing pass that it should not. What a gradient is made of shows through the
# rounding of its own type only.
_FP16 = replace(BF16, unit=2.0**-11, least=4 * 2.0**-11, most=16 * 2.0**-11)


@dataclass(frozen=True)
class Layout:
    """Parameters laid end to end, each divided by the size of its expected gradient, so that all count alike."""

    names: tuple[str, ...]
    sizes: list[int]
    scale: Tensor

    @classmethod
    def of(cls, due: Mapping[str, Gradient]) -> Self:
        """That of all parameters of ``due``."""
        sizes = [0 if gradient is None else gradient.numel() for gradient in due.values()]
        scales = torch.tensor([size_of(gradient) for gradient in due.values()], dtype=torch.float64)
        return cls(tuple(due), sizes, scales.repeat_interleave(torch.tensor(sizes, dtype=torch.int64)))

    def rows(self, every: Sequence[Mapping[str, Gradient]]) -> Tensor:
        """Each of ``every`` (N) end to end in fp64 (N, D); None is zero."""
        made = torch.empty(len(every), len(self.scale), dtype=torch.float64)
        for row, gradients in zip(made, every, strict=True):
            found = zip(self.sizes, map(gradients.get, self.names), strict=True)
            flat = [torch.zeros(size) if one is None else one.detach().cpu().flatten() for size, one in found]
            torch.cat([torch.zeros(0), *flat], out=row)
        return made.div_(self.scale)

    def split(self, rows: Tensor) -> dict[str, Tensor]:
        """The part of each parameter in tensors (..., D)."""
        return dict(zip(self.names, torch.split(rows, self.sizes, dim=-1), strict=True))


@dataclass(frozen=True)
class System:
    """The gradients of some of a stage's parameters, and atoms beside them as rows."""

    layout: Layout
    atoms: Sequence[Atom]
    target: Tensor
    rows: Tensor

    @classmethod
    def of(cls, atoms: Sequence[Atom], layout: Layout, seen: Mapping[str, Gradient]) -> Self:
        """The system of the parameters of ``layout``, all of which have gradients."""
        return cls(layout, atoms, layout.rows([seen])[0], layout.rows([atom.gradients for atom in atoms]))

    @property
    def names(self) -> tuple[str, ...]:
        return self.layout.names

    @cached_property
    def size(self) -> int:
        """How many elements say something: those that are always 0 do not."""
        return int(((self.rows != 0).any(dim=0) | (self.target != 0)).sum())

    def only(self, names: Sequence[str]) -> Self:
        """The part of ``names``."""
        kept = [k for k, name in enumerate(self.names) if name in names]

        def part(rows: Tensor) -> Tensor:
            pieces = torch.split(rows, self.layout.sizes, dim=-1)
            return torch.cat([rows[..., :0], *(pieces[k] for k in kept)], dim=-1)

        sizes = [self.layout.sizes[k] for k in kept]
        layout = Layout(tuple(self.names[k] for k in kept), sizes, part(self.layout.scale))
        return type(self)(layout, self.atoms, part(self.target), part(self.rows))

    def of_atoms(self, chosen: Sequence[int]) -> Self:
        """The same with some of the atoms."""
        return replace(self, atoms=[self.atoms[k] for k in chosen], rows=self.rows[list(chosen)])

    def conclusive(self, used: int, limit: float) -> bool:
        """Whether an explanation by ``used`` of the atoms cannot be chance."""
        return conclusive(self.size, used=used, atoms=len(self.atoms), limit=limit)

    def residual(self, weights: Sequence[float]) -> float:
        """What ``weights`` of the atoms leave of all parameters together, relative to the size of what they add."""
        return residual_of(self.target, self.rows, weights)

    def residuals(self, weights: Sequence[float]) -> dict[str, float]:
        """The same for each parameter."""
        targets, rows = self.layout.split(self.target), self.layout.split(self.rows)
        return {name: residual_of(targets[name], rows[name], weights) for name in self.names}


def weights(terms: Mapping[Term, float], atoms: Sequence[Atom]) -> list[float]:
    """The coefficients of ``atoms``, 0 for those that have none."""
    return [terms.get(atom.term, 0.0) for atom in atoms]


def size_of(gradient: Gradient) -> float:
    """The norm of a gradient; 1 where it is zero or None."""
    return (0.0 if gradient is None else gradient.double().norm().item()) or 1.0


def limit_of(due: Gradient, wide: Gradient) -> float:
    """What rounding may leave of one parameter: from what it left of the expected gradient on this very run.

    In the precision of the expected gradient, which is that of what made it, whatever type the step adds up in.
    """
    if due is None or wide is None:
        return Floor(0.0, 0.0, 0.0).limit
    precision = _FP16 if due.dtype == torch.float16 else precision_of(due.dtype)
    return Floor(0.0, error(due.cpu(), wide), 0.0, precision).limit
