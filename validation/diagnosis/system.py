"""A stage's gradients as a system of linear equations in the coefficients of atoms."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from reference.step import Gradient
from validation.diagnosis.atoms import Atom, Term
from validation.diagnosis.combination import conclusive, residual_of


@dataclass(frozen=True)
class System:
    """Some of a stage's parameters laid end to end, and atoms beside them as rows.

    Each parameter is divided by the size of its expected gradient, so that all count alike.
    """

    names: tuple[str, ...]
    sizes: list[int]
    atoms: Sequence[Atom]
    target: Tensor
    rows: Tensor

    @classmethod
    def of(
        cls, atoms: Sequence[Atom], names: Sequence[str], seen: Mapping[str, Gradient], due: Mapping[str, Gradient]
    ) -> Self:
        """The system of the parameters ``names``, all of which have gradients."""
        scales = {name: size_of(due[name]) for name in names}
        sizes = [0 if (gradient := due[name]) is None else gradient.numel() for name in names]

        def row(gradients: Mapping[str, Gradient]) -> Tensor:
            parts = [_flat(gradients.get(n), size) / scales[n] for n, size in zip(names, sizes, strict=True)]
            return torch.cat([torch.zeros(0, dtype=torch.float64), *parts])

        rows = [row(atom.gradients) for atom in atoms]
        return cls(tuple(names), sizes, atoms, row(seen), torch.stack(rows))

    def only(self, names: Sequence[str]) -> Self:
        """The part of ``names``."""
        parts = list(
            zip(
                self.names, torch.split(self.target, self.sizes), torch.split(self.rows, self.sizes, dim=1), strict=True
            )
        )
        kept = [(name, target, rows) for name, target, rows in parts if name in names]
        return type(self)(
            tuple(name for name, _, _ in kept),
            [len(target) for _, target, _ in kept],
            self.atoms,
            torch.cat([target for _, target, _ in kept]),
            torch.cat([rows for _, _, rows in kept], dim=1),
        )

    def of_atoms(self, chosen: Sequence[int]) -> Self:
        """The same with some of the atoms."""
        return replace(self, atoms=[self.atoms[k] for k in chosen], rows=self.rows[list(chosen)])

    def conclusive(self, used: int, limit: float) -> bool:
        """Whether an explanation by ``used`` of the atoms cannot be chance. Elements that are always 0 say nothing."""
        size = int(((self.rows != 0).any(dim=0) | (self.target != 0)).sum())
        return conclusive(size, used=used, atoms=len(self.atoms), limit=limit)

    def residual(self, weights: Sequence[float]) -> float:
        """What ``weights`` of the atoms leave of all parameters together, relative to the size of what they add."""
        return residual_of(self.target, self.rows, weights)

    def residuals(self, weights: Sequence[float]) -> dict[str, float]:
        """The same for each parameter."""
        parts = zip(
            self.names, torch.split(self.target, self.sizes), torch.split(self.rows, self.sizes, dim=1), strict=True
        )
        return {name: residual_of(target, rows, weights) for name, target, rows in parts}


def weights(terms: Mapping[Term, float], atoms: Sequence[Atom]) -> list[float]:
    """The coefficients of ``atoms``, 0 for those that have none."""
    return [terms.get(atom.term, 0.0) for atom in atoms]


def _flat(gradient: Gradient, size: int) -> Tensor:
    """A gradient end to end in fp64; None is zero."""
    if gradient is None:
        return torch.zeros(size, dtype=torch.float64)
    return gradient.detach().double().cpu().flatten()


def size_of(gradient: Gradient) -> float:
    """The norm of a gradient; 1 where it is zero or None."""
    return (0.0 if gradient is None else gradient.double().norm().item()) or 1.0
