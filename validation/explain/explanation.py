"""What a stage's gradients are made of: coefficients of the terms that leave nothing but rounding."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from pipeproof.core.observe.likeness import Likeness
from pipeproof.explain.atoms import Atom, Term, Wrong
from pipeproof.explain.limits import CLEARLY
from pipeproof.reference.step import Gradient, Stage


@dataclass(frozen=True)
class Explanation:
    """One stage's gradients as coefficients of terms; nominal terms are listed even where they are 0.

    ``residual`` is relative, ``limit`` what rounding may leave. ``explained``: it is rounding. ``undecided`` are terms
    whose coefficients could be others as well. ``wrong`` are the atoms that "flow" terms are numbered by, ``names`` the
    parameters that were compared, and ``odd`` those that the coefficients do not hold for. ``whole``: what every
    parameter of the stage is, such as missing. ``unfounded``: the reference's own microbatches do not add up to its own
    gradients, so nothing can be taken apart.
    """

    stage: Stage
    coefficients: Mapping[Term, float]
    residual: float
    limit: float
    explained: bool
    undecided: tuple[Term, ...] = ()
    odd: tuple[Likeness, ...] = ()
    compared: int = 0
    names: tuple[str, ...] = ()
    whole: str = ""
    unfounded: bool = False
    wrong: tuple[Wrong, ...] = field(default=(), repr=False)
    atoms: tuple[Atom, ...] = field(default=(), repr=False)

    @property
    def complete(self) -> bool:
        """Whether it says something of every parameter."""
        return self.explained and all(one.is_known for one in self.odd)

    def is_by_chance(self, other: "Explanation", lead: float) -> bool:
        """Whether its one factor of all is only near to that of the ``other``, which leaves far less.

        ``lead``: how far, relative to it, rounding may lead from one factor to another. That all is there once is never
        by chance.
        """
        told, better = (set(one.coefficients.values()) for one in (self, other))
        if len(told) != 1 or len(better) != 1 or told <= {0.0, 1.0, -1.0}:
            return False
        apart = abs(min(told) - min(better)) > lead * abs(min(better))
        return apart and self.residual > CLEARLY * other.residual

    def predicted(self, name: str) -> Gradient:
        """What the coefficients make of parameter ``name``; None where no atom says anything."""
        terms = [(self.coefficients[atom.term], atom.gradients.get(name)) for atom in self.atoms]
        parts = [c * gradient for c, gradient in terms if gradient is not None and c]
        return torch.stack(parts).sum(dim=0) if parts else None
