"""Whether gradients of which none is a fault for itself are larger, or smaller, than what is due by one factor."""

import math
from dataclasses import dataclass, field

from pipeproof.core.limits import FEW, SEVERAL
from pipeproof.core.tolerance import Floor


@dataclass(frozen=True)
class Leads:
    """How many times what is due gradients are: of what, the factor, and how far from it rounding may lead.

    A coarse type leaves room for a gradient that is a hundredth too large, as of a wrong divisor. Rounding is as often
    up as down, so that it leads few tensors anywhere, and hardly all of them one way.
    """

    found: frozenset[tuple[object, float, float]] = field(default_factory=frozenset)
    near: frozenset[object] = frozenset()  # what is as near as its own sum rounds
    far: frozenset[object] = frozenset()  # what is not, and need not be, as what is added up is rounded more coarsely

    @classmethod
    def one(cls, what: object, factor: float | None, floor: Floor | None = None) -> "Leads":
        """Of one that is no fault by ``floor``, or is what is due to the bit."""
        if factor is None or (floor is not None and floor.noise):
            return cls()
        led = 0.0 if floor is None else floor.led if floor.led < math.inf else floor.limit
        one, none = frozenset([what]), frozenset[object]()
        # Of fp16, in which small numbers have fewer digits, a scale of the loss makes other backwards by itself.
        far = floor is not None and floor.sums is not None and floor.precision.name == "bf16"
        return cls(frozenset([(what, factor, led)]), none if far else one, one if far else none)

    def joined(self, other: "Leads") -> "Leads":
        """Of these and the ``other`` ones."""
        return Leads(self.found | other.found, self.near | other.near, self.far | other.far)

    def doubts(self, *, losses_agree: bool) -> list[str]:
        """Why they may not be right together; empty where nothing speaks against them.

        ``losses_agree``: all losses are what is due to the bit.
        """
        return [*filter(None, (self._one_way, self._some_alone(losses_agree)))]

    def _some_alone(self, losses_agree: bool) -> str:
        """Other kernels than the reference's show everywhere, as a rule: what comes later takes what they made."""
        if not self.far or not (self.near or losses_agree):
            return ""
        told = f"{len(self.far)} of {len(self.near | self.far)} are off by more than their sums round, and"
        others = "the others are not" if self.near else "losses agree to the bit"
        return f"{told} {others}: kernels that are not the reference's show everywhere, as a rule"

    @property
    def _one_way(self) -> str:
        leading = [(what, factor) for what, factor, led in self.found if abs(factor - 1) > led]
        if len({factor > 1 for _, factor in leading}) != 1 or not self._doubtful:
            return ""
        of, every = ({what for what, *_ in some} for some in (leading, self.found))
        which = f"all {len(of)}" if of == every else f"{len(of)} of the {len(every)}"
        factors = [factor for _, factor in leading]
        times = f"{min(factors):.4g} to {max(factors):.4g} times what is due"
        others = "" if of == every else ", as the others may be"
        told = f"none is a fault for itself, but {which} that are not rounding alone are {times}{others}"
        return f"{told}, and rounding hardly leads all one way: by what are losses divided?"

    @property
    def _doubtful(self) -> bool:
        """Whether so many lead that it is no chance: half, where one factor may be that of all, or several and all."""
        of, every = (
            {what for what, factor, led in self.found if abs(factor - 1) > led},
            {what for what, *_ in self.found},
        )
        alike = max(f - led for _, f, led in self.found) <= min(f + led for _, f, led in self.found)
        whole = all(abs(factor - 1) > led for _, factor, led in self.found)
        return (alike and len(of) >= max(FEW, len(every) / 2)) or (whole and len(of) >= SEVERAL)
