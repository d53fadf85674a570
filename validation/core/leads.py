"""Detect a common factor over gradients too near to be faults each."""

import math
from dataclasses import dataclass, field

from pipeproof.core.limits import FEW, SEVERAL
from pipeproof.core.tolerance import Floor


@dataclass(frozen=True)
class Leads:
    """Gradient factors over expected values, each with the lead that rounding may cause.

    A coarse type hides a gradient one hundredth too large, as from a wrong divisor. Rounding goes up as often as down,
    so it leads few tensors, and hardly all in one direction.
    """

    found: frozenset[tuple[object, float, float]] = field(default_factory=frozenset)
    near: frozenset[object] = frozenset()  # items within their own sum's rounding
    far: frozenset[object] = frozenset()  # items beyond it, allowed by coarser summands

    @classmethod
    def one(cls, what: object, factor: float | None, floor: Floor | None = None) -> "Leads":
        """Build from one item: bit for bit, or within ``floor``."""
        if factor is None or (floor is not None and floor.noise):
            return cls()
        led = 0.0 if floor is None else floor.led if floor.led < math.inf else floor.limit
        one, none = frozenset([what]), frozenset[object]()
        # In fp16, small numbers lose digits, so a loss scale alone changes backwards.
        far = floor is not None and floor.sums is not None and floor.precision.name == "bf16"
        return cls(frozenset([(what, factor, led)]), none if far else one, one if far else none)

    def join(self, other: "Leads") -> "Leads":
        """Merge with ``other``."""
        return Leads(self.found | other.found, self.near | other.near, self.far | other.far)

    def doubts(self, *, losses_agree: bool) -> list[str]:
        """Return objections to the gradients as a whole.

        losses_agree: all losses agree bit for bit.
        """
        return [*filter(None, (self._one_way, self._some_alone(losses_agree)))]

    def _some_alone(self, losses_agree: bool) -> str:
        """Doubt isolated deviations: foreign kernels usually deviate everywhere downstream."""
        if not self.far or not (self.near or losses_agree):
            return ""
        count = f"{len(self.far)} of {len(self.near | self.far)} are off by more than their sums round, and"
        others = "the others are not" if self.near else "losses agree to the bit"
        return f"{count} {others}: kernels that are not the reference's show everywhere, as a rule"

    @property
    def _one_way(self) -> str:
        leading = [(what, factor) for what, factor, led in self.found if abs(factor - 1) > led]
        if len({factor > 1 for _, factor in leading}) != 1 or not self._doubtful:
            return ""
        of, every = ({what for what, *_ in some} for some in (leading, self.found))
        which = f"all {len(of)}" if of == every else f"{len(of)} of the {len(every)}"
        factors = [factor for _, factor in leading]
        times = f"{min(factors):.4g} to {max(factors):.4g} times what is expected"
        others = "" if of == every else ", as the others may be"
        which_lead = f"none alone proves a fault, but {which} beyond pure rounding are {times}{others}"
        return f"{which_lead}, and rounding goes both ways: check what losses are divided by"

    @property
    def _doubtful(self) -> bool:
        """True if chance is unlikely: half lead by one possible factor, or all lead."""
        of, every = (
            {what for what, factor, led in self.found if abs(factor - 1) > led},
            {what for what, *_ in self.found},
        )
        alike = max(f - led for _, f, led in self.found) <= min(f + led for _, f, led in self.found)
        whole = all(abs(factor - 1) > led for _, factor, led in self.found)
        return (alike and len(of) >= max(FEW, len(every) / 2)) or (whole and len(of) >= SEVERAL)
