"""Rounding-level deviations: weights one rounding off, or fp32 products rounded otherwise.

They prove no fault. A unit near zero may be on in one run and off in another with other rounding, as with other
kernels. Then a gradient jumps, farther than sums round, with nothing wrong. Weights moved up and down flip such units
too.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from pipeproof.core.limits import BY_NAME, LEAD, LED, NUDGED
from pipeproof.core.measured import Compared
from pipeproof.core.tolerance import error, lead, scalar_error
from pipeproof.core.verdict import Mismatch, Size, Verdict, overall
from pipeproof.reference.products import CONVOLUTION, MATRICES
from pipeproof.reference.step import Expected, Gradient, Site

_MOVES = ("loss", "gradient", "grad-norm", "updated-parameters")  # laws whose values move with the weights
_LOCATES = "boundaries"  # its deviations count through the results
_NOTE = (
    "no fault is proven: weights that are one rounding off move it as far, as where a unit near zero is on in one run "
    "and off in another; fp32 decides it"
)
# Allowance in units of the coarser rounding. Units near zero that flip move gradients farther than losses. A generous
# bound loses nothing: the next run, computed alike, decides.
_UNITS = {"loss": 16, "grad-norm": 16, "gradient": 64}
_PRODUCTS = {  # product names, and their settings
    MATRICES: ("matrix products", "torch.set_float32_matmul_precision"),
    CONVOLUTION: ("convolutions", "torch.backends.fp32_precision"),
}

Sums = dict[Site, Gradient]


@dataclass(frozen=True)
class Nudged:
    """Movements relative to expected values: gradients by parameter, norm, and updates by parameter.

    loss: the largest loss movement, since single losses may be lucky. leads: movement along the expected gradient, as a
    factor would. least: minimum rounding allowance; below it, faults show in other ways than by size.
    """

    gradients: Mapping[str, float]
    leads: Mapping[str, float]
    norm: float = 0.0
    loss: float = 0.0
    least: float = 0.0
    updates: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def measure(
        cls,
        expected: Expected,
        others: Iterable[tuple[Sums, Sequence[float]]],
        *,
        unit: float,
        least: float,
        norm: Callable[[Sums], float],
        updated: Callable[[Sums], Mapping[Site, Tensor]] | None = None,
    ) -> "Nudged":
        """Measure over ``others``, sets with gradients and losses. ``norm`` and ``updated`` follow from each.

        unit: the computing type's unit. least: the field.
        """
        gradients, leads, updates, numbers = (dict[str, float]() for _ in range(4))
        for other, losses in others:
            for site, one in expected.gradients.items():
                moved = other.get(site)
                if one is not None and moved is not None:
                    _reach(gradients, site[1], error(moved, one))
                    _reach(leads, site[1], max(LEAD * unit, LED * lead(moved, one)))
            _reach(numbers, "norm", scalar_error(norm(other), expected.norm or 0.0))
            for loss, wanted in zip(losses, expected.losses, strict=True):
                _reach(numbers, "loss", scalar_error(loss, wanted))
            for site, after in ({} if updated is None else updated(other)).items():
                if site in expected.parameters:
                    start = expected.before[site[1]]
                    _reach(updates, site[1], error(after, expected.parameters[site], base=start, rounded=True))
        return cls(gradients, leads, numbers.get("norm", 0.0), numbers.get("loss", 0.0), least, updates)

    def explains(self, one: Mismatch) -> bool:
        """True if movement and lead cover the mismatch."""
        if one.law not in _MOVES or one.error is None or (one.limit or 0.0) < self.least:
            return False
        name = str(one.parameter)
        far = {"loss": self.loss, "grad-norm": self.norm}.get(one.law, self.gradients.get(name, 0.0))
        if one.law == "updated-parameters":
            far = max(far, self.updates.get(name, 0.0))
        times = one.observed.factor if one.law == "gradient" and isinstance(one.observed, Size) else None
        led = times is None or abs(times - 1) <= self.leads.get(name, 0.0)
        return led and one.error <= NUDGED * far


def _reach(found: dict[str, float], name: str, far: float) -> None:
    """Note the largest movement; overflow and growth from zero would excuse anything."""
    if math.isfinite(far):
        found[name] = max(found.get(name, 0.0), far)


@dataclass(frozen=True)
class OtherProducts:
    """Rounding types for one product sort, ``expected`` and ``observed``, as named in ``products_in``."""

    sort: str
    expected: str
    observed: str

    @classmethod
    def among(cls, expected: Mapping[str, str], observed: Iterable[Mapping[str, str]]) -> "OtherProducts | None":
        """Return the first sort with an observed difference; None if unreported or equal."""
        both = ((sort, name, one.get(sort, name)) for one in observed for sort, name in expected.items())
        return next((cls(*found) for found in both if found[1] != found[2] and {*found[1:]} <= BY_NAME.keys()), None)

    def explain(self, verdict: Verdict, wrong: Sequence[Mismatch]) -> bool:
        """True if product rounding may explain all: small errors, in half the gradients or more.

        Values right to the last place were computed alike, and so would be their successors.
        """
        gradients = [one for one in verdict.measured.of("gradient") if one.error or not one.floor]
        off = {one.parameter for one in gradients if one.outcome != "pass"}
        unit = max(BY_NAME[self.expected].unit, BY_NAME[self.observed].unit)

        def explains(one: Mismatch) -> bool:
            if one.law == "updated-parameters":  # optimizers may amplify little
                return one.parameter in off
            # At a boundary, another microbatch's tensor, or a part, would move gradients far.
            return one.law == _LOCATES or (one.error is not None and one.error <= _UNITS.get(one.law, 0) * unit)

        return 2 * len(off) >= len(gradients) > 0 and all(map(explains, wrong))

    @property
    def note(self) -> str:
        """The reason for doubt, with a remedy."""
        what, where = _PRODUCTS.get(self.sort, (self.sort, "torch's settings"))
        return (
            f"no fault is proven: the job computes {what} of fp32 in {self.observed}, and the reference in "
            f"{self.expected}, which may put everything off a little; have both computed alike: {where} says how"
        )


Nudges = Callable[[int], Nudged | None]  # by operation, from 0; None if unknown


def doubt_rounding(
    verdict: Verdict, moved: Nudges, products: Callable[[int], OtherProducts | None] = lambda _: None
) -> Verdict:
    """Turn "fail" into "unknown" if rounding may explain the first faulty operation.

    ``moved`` measures movement for an operation; it costs much, so it runs last. ``products``: products computed
    otherwise.
    """
    if verdict.outcome != "fail" or verdict.stopped:
        return verdict
    failed = {law.name for law in verdict.laws if law.outcome == "fail"}
    places = {outcome: set[tuple[object, ...]]() for outcome in ("unknown", "fail")}
    for compared in verdict.measured.compared:
        places.get(compared.outcome, set()).add(_about(compared))
    doubtful = places["unknown"] - places["fail"]
    first = min((one.operation for one in verdict.mismatches), default=0)  # later faults follow from it
    proven = (one for one in verdict.mismatches if one.law in failed and not one.within and _about(one) not in doubtful)
    wrong = [one for one in proven if one.operation == first]
    if not wrong:
        return verdict
    try:
        other = products(first - 1)
        if other is not None and other.explain(verdict, wrong):
            return _in_doubt(verdict, other.note)
        results = [one for one in wrong if one.law != _LOCATES]
        found = moved(first - 1) if all(one.law in _MOVES for one in results) else None
    except Exception:  # any type: the user's model runs again
        return verdict
    return verdict if found is None or not all(map(found.explains, results)) else _in_doubt(verdict, _NOTE)


def _about(one: Mismatch | Compared) -> tuple[object, ...]:
    return one.law, one.operation, one.microbatch, one.parameter


def _in_doubt(verdict: Verdict, why: str) -> Verdict:
    """Return ``verdict`` with its failed laws unknown."""
    laws = tuple(
        replace(law, outcome="unknown", note="; ".join(filter(None, [why, law.note]))) if law.outcome == "fail" else law
        for law in verdict.laws
    )
    every = verdict.measured.compared
    every = tuple(replace(one, outcome="unknown") if one.outcome == "fail" else one for one in every)
    return replace(verdict, outcome=overall(laws), laws=laws, measured=replace(verdict.measured, compared=every))
