"""Detect a common factor over gradients too near to be faults each."""

import math
from collections.abc import Collection
from typing import NamedTuple

from pipeproof.core.limits import FEW, SEVERAL
from pipeproof.core.tolerance import Floor


class Lead(NamedTuple):
    """A gradient's factor over the expected one, and the lead that rounding may cause.

    far: allowed by coarser summands, beyond its own sum's rounding.
    """

    what: object
    factor: float
    led: float = 0.0
    far: bool = False

    @classmethod
    def of(cls, what: object, factor: float, floor: Floor | None = None) -> "Lead":
        """Build from one item: bit for bit, or within ``floor``."""
        if floor is None:
            return cls(what, factor)
        # In fp16, small numbers lose digits, so a loss scale alone changes backwards.
        far = floor.sums is not None and floor.precision.name == "bf16"
        return cls(what, factor, floor.led if floor.led < math.inf else floor.limit, far)


def doubts(every: Collection[Lead], *, losses_agree: bool) -> list[str]:
    """Return objections to the gradients as a whole.

    A coarse type hides a gradient one hundredth too large, as from a wrong divisor. Rounding goes up as often as down,
    so it leads few tensors, and hardly all in one direction: chance is unlikely if half lead by one possible factor, or
    all lead. Foreign kernels usually deviate everywhere downstream, so isolated deviations are doubtful too.
    losses_agree: all losses agree bit for bit.
    """
    found = []
    leading = [one for one in every if abs(one.factor - 1) > one.led]
    of, items = ({one.what for one in some} for some in (leading, every))
    if len({one.factor > 1 for one in leading}) == 1:
        alike = max(one.factor - one.led for one in every) <= min(one.factor + one.led for one in every)
        whole = len(leading) == len(every)
        if (alike and len(of) >= max(FEW, len(items) / 2)) or (whole and len(of) >= SEVERAL):
            which = f"all {len(of)}" if of == items else f"{len(of)} of the {len(items)}"
            factors = [one.factor for one in leading]
            times = f"{min(factors):.4g} to {max(factors):.4g} times what is expected"
            others = "" if of == items else ", as the others may be"
            which_lead = f"none alone proves a fault, but {which} beyond pure rounding are {times}{others}"
            found.append(f"{which_lead}, and rounding goes both ways: check what losses are divided by")
    far, near = ({one.what for one in every if one.far == beyond} for beyond in (True, False))
    if far and (near or losses_agree):
        count = f"{len(far)} of {len(items)} are off by more than their sums round, and"
        others = "the others are not" if near else "losses agree to the bit"
        found.append(f"{count} {others}: kernels that are not the reference's show everywhere, as a rule")
    return found
