"""Whether gradients of which none is a fault for itself are all of them larger, or all smaller, than what is due."""

import math
from dataclasses import dataclass, field

from pipeproof.judging.tolerance import Floor

_SEVERAL = 4  # parameters: of fewer it may be chance


@dataclass(frozen=True)
class Leads:
    """How many times what is due gradients are, in ``least`` to ``most``; 1.0 counts one that is not farther than
    rounding leads. ``of``: what they are of.

    A coarse type leaves room for a gradient that is a hundredth too large, as of a wrong divisor. Rounding is as often
    up as down, so that it leads few tensors anywhere, and hardly all of them one way.
    """

    least: float = math.inf
    most: float = -math.inf
    of: frozenset[object] = field(default_factory=frozenset)

    @classmethod
    def one(cls, what: object, factor: float | None, floor: Floor | None = None) -> "Leads":
        """Of one that is no fault by ``floor``, or is what is due to the bit."""
        if factor is None or (floor is not None and floor.noise):
            return cls()
        found = factor if floor is not None and abs(factor - 1) > floor.led else 1.0
        return cls(found, found, frozenset([what]))

    def joined(self, other: "Leads") -> "Leads":
        """Of these and the ``other`` ones."""
        return Leads(min(self.least, other.least), max(self.most, other.most), self.of | other.of)

    @property
    def doubt(self) -> str:
        """Why they may not be right together; empty where nothing speaks against them."""
        if len(self.of) < _SEVERAL or self.least <= 1 <= self.most:
            return ""
        times = f"{self.least:.4g} to {self.most:.4g} times what is due"
        told = f"none is a fault for itself, but all {len(self.of)} that are not rounding alone are {times}"
        return f"{told}, and rounding hardly leads all one way: by what are losses divided?"
