"""What is off by no more than rounding: by weights one rounding off, or products of fp32 that are rounded otherwise.

A fault of that size is not proven. A unit near zero may be on in one run and off in another that rounds otherwise, as
with other kernels. Then a gradient jumps, farther than any sum rounds, and nothing is wrong. Weights that are off one
way and the other turn such units, too.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from pipeproof.core.limits import BY_NAME, LEAD, LED, NUDGED
from pipeproof.core.measured import Compared
from pipeproof.core.tolerance import error, lead, scalar_error
from pipeproof.core.verdict import Mismatch, Size, Verdict, overall
from pipeproof.reference.products import CONVOLUTION, MATRICES
from pipeproof.reference.step import Expected, Gradient, Site

_MOVES = ("loss", "gradient", "grad-norm", "updated-parameters")  # laws of what does
_LOCATES = "boundaries"  # where these are off, results show whether by more than rounding
_NOTE = (
    "no fault is proven: weights that are one rounding off move it as far, as where a unit near zero is on in one run "
    "and off in another; fp32 decides it"
)
# Units of the coarser rounding: as far off may these be. Units near zero that are on in one run and off in the other
# put gradients farther off than losses. Nothing is lost by a generous bound: computed alike, the next run decides.
_UNITS = {"loss": 16, "grad-norm": 16, "gradient": 64}
_TOLD = {  # what they are called, and where they are set
    MATRICES: ("matrix products", "torch.set_float32_matmul_precision"),
    CONVOLUTION: ("convolutions", "torch.backends.fp32_precision"),
}

Sums = dict[Site, Gradient]


@dataclass(frozen=True)
class Nudged:
    """Relative to what is due: gradients by parameter, their norm, and what an optimizer makes of each parameter.

    ``loss``: the loss that moves farthest, for a single one may hardly move by chance. ``leads``: how far gradients may
    move along what is due, as a factor moves them. ``least``: what rounding is allowed at least; where less was
    allowed, a fault shows in another way than by its size.
    """

    gradients: Mapping[str, float]
    leads: Mapping[str, float]
    norm: float = 0.0
    loss: float = 0.0
    least: float = 0.0
    updates: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def measured(
        cls,
        due: Expected,
        others: Iterable[tuple[Sums, Sequence[float]]],
        *,
        unit: float,
        least: float,
        norm: Callable[[Sums], float],
        updated: Callable[[Sums], Mapping[Site, Tensor]] | None = None,
    ) -> "Nudged":
        """By ``others``, gradients and losses one set after another; ``norm`` and ``updated``: what follows from each.

        ``unit``: that of the type that is computed in. ``least``: as it has.
        """
        gradients, leads, updates, numbers = (dict[str, float]() for _ in range(4))
        for other, losses in others:
            for site, one in due.gradients.items():
                moved = other.get(site)
                if one is not None and moved is not None:
                    _reach(gradients, site[1], error(moved, one))
                    _reach(leads, site[1], max(LEAD * unit, LED * lead(moved, one)))
            _reach(numbers, "norm", scalar_error(norm(other), due.norm or 0.0))
            for loss, wanted in zip(losses, due.losses, strict=True):
                _reach(numbers, "loss", scalar_error(loss, wanted))
            for site, after in ({} if updated is None else updated(other)).items():
                if site in due.parameters:
                    start = due.before[site[1]]
                    _reach(updates, site[1], error(after, due.parameters[site], base=start, rounded=True))
        return cls(gradients, leads, numbers.get("norm", 0.0), numbers.get("loss", 0.0), least, updates)

    def explains(self, one: Mismatch) -> bool:
        """Whether what ``one`` is about moves as far as it is off, and leads as far."""
        if one.law not in _MOVES or one.error is None or (one.limit or 0.0) < self.least:
            return False
        name = str(one.parameter)
        far = {"loss": self.loss, "grad-norm": self.norm}.get(one.law, self.gradients.get(name, 0.0))
        if one.law == "updated-parameters":
            far = max(far, self.updates.get(name, 0.0))
        return one.error <= NUDGED * far and (one.law != "gradient" or self._leads(name, one.found))

    def _leads(self, name: str, found: object) -> bool:
        """Whether a gradient leads as far along what is due as what was ``found`` does."""
        times = found.factor if isinstance(found, Size) else None
        return times is None or abs(times - 1) <= self.leads.get(name, 0.0)


def _reach(found: dict[str, float], name: str, far: float) -> None:
    """Note how ``far`` something moves, unless it overflows or grows out of zero: that would explain anything."""
    if math.isfinite(far):
        found[name] = max(found.get(name, 0.0), far)


@dataclass(frozen=True)
class OtherProducts:
    """As what one sort of them is rounded in what is ``due``, and in what is ``seen``: names of ``products_in``."""

    sort: str
    due: str
    seen: str

    @classmethod
    def among(cls, due: Mapping[str, str], seen: Iterable[Mapping[str, str]]) -> "OtherProducts | None":
        """The first sort that any of those that were seen has otherwise; None where nobody says so."""
        both = ((sort, name, one.get(sort, name)) for one in seen for sort, name in due.items())
        return next((cls(*found) for found in both if found[1] != found[2] and {*found[1:]} <= BY_NAME.keys()), None)

    def explain(self, verdict: Verdict, wrong: Sequence[Mismatch]) -> bool:
        """Whether that may be all: what is ``wrong`` is hardly off, and so are half of the gradients or more.

        What is right to the last place was computed alike, and what follows from it would be.
        """
        gradients = [one for one in verdict.measured.of("gradient") if one.error or not one.floor]
        off = {one.parameter for one in gradients if one.outcome != "pass"}
        return 2 * len(off) >= len(gradients) > 0 and all(self._explains(one, off) for one in wrong)

    def _explains(self, one: Mismatch, off: set[str | None]) -> bool:
        if one.law == "updated-parameters":  # an optimizer may make much of little
            return one.parameter in off
        if one.law == "boundaries":  # of another microbatch's tensor, or a part of one, gradients would be far off
            return True
        unit = max(BY_NAME[self.due].unit, BY_NAME[self.seen].unit)
        return one.error is not None and one.error <= _UNITS.get(one.law, 0) * unit

    @property
    def note(self) -> str:
        """Why nothing is proven, and what to do."""
        what, where = _TOLD.get(self.sort, (self.sort, "torch's settings"))
        return (
            f"no fault is proven: the job computes {what} of fp32 in {self.seen}, and what is due was computed in "
            f"{self.due}, which may put everything off a little; have both computed alike: {where} says how"
        )


Nudges = Callable[[int], Nudged | None]  # of an operation, from 0; None where nobody knows


def doubt_rounding(
    verdict: Verdict, moved: Nudges, products: Callable[[int], OtherProducts | None] = lambda _: None
) -> Verdict:
    """``verdict``; unknown where rounding may be all that is first wrong. What explains it has no part in that.

    Both are asked for an operation: ``moved`` how far rounding goes there, which is costly, and so asked for last,
    ``products`` for those that were computed otherwise.
    """
    wrong = list(_failing(verdict)) if verdict.verdict == "fail" and not verdict.stopped else []
    first = min((one.operation for one in verdict.mismatches), default=0)  # what is wrong later follows from that
    wrong = [one for one in wrong if one.operation == first]
    if not wrong:
        return verdict
    try:
        other = products(first - 1)
        if other is not None and other.explain(verdict, wrong):
            return _in_doubt(verdict, other.note)
        results = [one for one in wrong if one.law != _LOCATES]
        found = moved(first - 1) if all(one.law in _MOVES for one in results) else None
    except Exception:  # no one type: the user's model runs once more
        return verdict
    return verdict if found is None or not all(map(found.explains, results)) else _in_doubt(verdict, _NOTE)


def _failing(verdict: Verdict) -> Iterator[Mismatch]:
    """The mismatches that are no mere doubt each for itself."""
    failed = {law.name for law in verdict.laws if law.outcome == "fail"}
    told = {outcome: set[tuple[object, ...]]() for outcome in ("unknown", "fail")}
    for compared in verdict.measured.compared:
        told.get(compared.outcome, set()).add(_about(compared))
    doubtful = told["unknown"] - told["fail"]
    return (one for one in verdict.mismatches if one.law in failed and not one.within and _about(one) not in doubtful)


def _about(one: Mismatch | Compared) -> tuple[object, ...]:
    return one.law, one.operation, one.microbatch, one.parameter


def _in_doubt(verdict: Verdict, why: str) -> Verdict:
    """``verdict``, of which nothing proves a fault."""
    laws = tuple(
        replace(law, outcome="unknown", note="; ".join(filter(None, [why, law.note]))) if law.outcome == "fail" else law
        for law in verdict.laws
    )
    every = verdict.measured.compared
    every = tuple(replace(one, outcome="unknown") if one.outcome == "fail" else one for one in every)
    return replace(verdict, verdict=overall(laws), laws=laws, measured=replace(verdict.measured, compared=every))
