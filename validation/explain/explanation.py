"""Coefficients for a stage's gradients: terms that leave only rounding."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from pipeproof.core.observe.likeness import Likeness
from pipeproof.explain.atoms import Atom, Term, Wrong
from pipeproof.explain.limits import CLEARLY
from pipeproof.reference.step import Gradient, Stage


@dataclass(frozen=True)
class Explanation:
    """A stage's gradients as coefficients on terms, with zeros for missing nominal terms.

    ``residual`` is relative; ``limit``: its bound by rounding; ``explained``: it is rounding. ``undecided``: terms with
    ambiguous coefficients. ``wrong``: the atoms that "flow" terms number; ``names``: the parameters compared; ``odd``:
    those that deviate from the coefficients. ``whole``: the common state of every parameter, such as missing.
    ``unfounded``: the reference's own microbatches do not add up to its gradients, so nothing can be decomposed.
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
        """True if every parameter has an explanation."""
        return self.explained and all(one.is_known for one in self.odd)

    def is_by_chance(self, other: "Explanation", lead: float) -> bool:
        """True if the single factor only approximates the ``other`` one, which leaves far less.

        ``lead``: how far, relatively, rounding may move a factor. Coefficients of 1 are never by chance.
        """
        own, better = (set(one.coefficients.values()) for one in (self, other))
        if len(own) != 1 or len(better) != 1 or own <= {0.0, 1.0, -1.0}:
            return False
        apart = abs(min(own) - min(better)) > lead * abs(min(better))
        return apart and self.residual > CLEARLY * other.residual

    def predict(self, name: str) -> Gradient:
        """Predict a parameter's gradient from the coefficients; None if no atom contributes."""
        terms = [(self.coefficients[atom.term], atom.gradients.get(name)) for atom in self.atoms]
        parts = [c * gradient for c, gradient in terms if gradient is not None and c]
        return torch.stack(parts).sum(dim=0) if parts else None
