"""The ledger: all comparisons in a validation, with place, laws and outcome."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypedDict

from torch import Tensor

from pipeproof.core.leads import Lead, doubts
from pipeproof.core.limits import FP32, FP64, Precision, coarsest
from pipeproof.core.measured import Compared
from pipeproof.core.observe.elements import any_nonzero, is_rounded
from pipeproof.core.observe.sketch import Sketch
from pipeproof.core.reason import Doubt, Reason, reasons_of
from pipeproof.core.tolerance import Floor, same_bits, sizes
from pipeproof.core.verdict import LawResult, Mismatch, Outcome, Size, Tier, Value, What
from pipeproof.pipeline.sizes import first_few

HELD = "what came before was bit for bit, so that rounding in {} does not excuse this"
ENDLESS = Reason.NOT_FINITE.doubt("not finite on either side: no fault shows there")
_GRADIENT = "gradient"
COMPUTED = ("loss", _GRADIENT)  # laws about each microbatch's results
_KEPT = (*COMPUTED, "grad-norm")  # laws whose comparisons the ledger stores singly


@dataclass
class _Entry:
    checked: int = 0
    exact: int = 0
    wrong: int = 0
    aside: int = 0  # inexact comparisons that decide nothing
    empty: Counter[str] = field(default_factory=Counter)  # passes that cannot reveal a fault, by description
    worst: float = 0.0
    floor: float = 0.0
    outcomes: set[str] = field(default_factory=set)
    notes: dict[str, None] = field(default_factory=dict)
    entered: set[tuple[int, str | int | None]] = field(default_factory=set)  # operations, each with what was compared
    left_out: dict[str, None] = field(default_factory=dict)
    reasons: dict[Reason, None] = field(default_factory=dict)
    leads: set[Lead] = field(default_factory=set)  # gradients, each too near to be a fault alone

    def add(self, other: "_Entry") -> None:
        if other.worst > self.worst:
            self.worst, self.floor = other.worst, other.floor
        for name in ("checked", "exact", "wrong", "aside", "empty"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("outcomes", "notes", "entered", "left_out", "reasons", "leads"):
            setattr(self, name, getattr(self, name) | getattr(other, name))


class Where(TypedDict, total=False):
    """A parameter's known rank and stage."""

    rank: int
    stage: int


class Ledger:
    """Collects comparisons. A law without entries stays "unknown", unless skipped."""

    def __init__(self, laws: Sequence[str]) -> None:
        self._entries = {law: _Entry() for law in laws}
        self.scenarios: Sequence[Collection[str]] = ()  # by operation: laws that its comparisons are entered under, too
        self._skipped: dict[str, tuple[Outcome, str]] = {}
        self._precisions: dict[Precision, None] = {}  # of inexact agreements, in order
        self.held: frozenset[str] = frozenset()  # laws whose rounding no narrow type excuses
        self.mismatches: list[Mismatch] = []
        self.compared: dict[tuple[object, ...], Compared] = {}  # by place; later operations replace earlier ones

    def empty_copy(self) -> "Ledger":
        """Return an empty ledger with the same laws and skips."""
        copy = Ledger([*self._entries])
        copy._skipped, copy.held, copy.scenarios = dict(self._skipped), self.held, self.scenarios
        return copy

    @property
    def failed(self) -> bool:
        """True after any failed or unknown comparison."""
        return any(one.outcomes & {"fail", "unknown"} for law, one in self._entries.items() if law not in self._skipped)

    @property
    def exact(self) -> frozenset[str]:
        """Return computed laws, if all their comparisons so far were bit for bit."""
        own = {law: self._entries[law] for law in COMPUTED if law in self._entries and self._entries[law].checked}
        return frozenset(own) if all(entry.exact == entry.checked for entry in own.values()) else frozenset()

    def is_undecided(self, law: str) -> bool:
        """True if a comparison under ``law`` is unknown and none failed."""
        outcomes = self._entries[law].outcomes
        return "unknown" in outcomes and "fail" not in outcomes

    def skip(self, law: str, reason: str) -> None:
        """Declare ``law`` inapplicable."""
        self._skipped[law] = "not applicable", reason

    def miss(self, law: str, why: str) -> None:
        """Declare ``law`` unobserved."""
        self._skipped[law] = "not observed", Reason.UNREPORTED.doubt(why)

    def doubt(self, law: str, why: str, reason: Reason = Reason.UNCOMPARED) -> None:
        """Declare ``law`` unknown. ``reason``: used unless ``why`` has its own."""
        self._entries[law].outcomes.add("unknown")
        self._entries[law].reasons |= dict.fromkeys(reason.doubt(why).reasons)
        self.remark(law, why)

    def remark(self, law: str, note: str) -> None:
        """Note a fact about ``law`` without changing its outcome."""
        self._entries[law].notes.setdefault(note)

    def leave_out(
        self, law: str, names: Sequence[str], why: str, reason: Reason = Reason.UNCOMPARED, *, hides: bool = True
    ) -> None:
        """List ``names`` missing from the comparisons under ``law``. ``hides``: a fault may hide there."""
        if names:
            self._entries[law].left_out |= dict.fromkeys(names)
            note = Doubt(f"{why}: {first_few(names)}", reason.doubt(why).reasons)
            (self.doubt if hides else self.remark)(law, note)

    def compared_names(self, law: str, number: int) -> set[str | int | None]:
        """Return parameters or microbatches compared under ``law`` in operation ``number`` (from 0)."""
        return {what for operation, what in self._entries[law].entered if operation == number + 1}

    def hold(
        self,
        place: Mismatch,
        holds: bool,
        found: Value,
        expected: Value,
        *,
        what: What = "text",
        exact: bool = True,
        text: str = "",
    ) -> None:
        """Enter a yes/no comparison. ``exact``: agreement means bit for bit."""
        outcome, exact = "pass" if holds else "fail", holds and exact
        self._enter(place, outcome, exact=exact, observed=found, expected=expected, what=what, text=text)

    def tensors(
        self,
        place: Mismatch,
        observed: Tensor,
        expected: Tensor,
        floor: Callable[[], Floor],
        *,
        base: Tensor | None = None,
        rounded: bool = False,
    ) -> None:
        """Compare two tensors. ``base``: compare movements from it. ``rounded``: allow storage rounding in last
        places."""
        if same_bits(observed, expected):
            self._agree(place, lambda: any_nonzero(expected))
            return
        size, outcome, allowed = floor().compare(observed, expected, base=base, rounded=rounded)
        if not is_rounded(expected.dtype):  # integers have no rounding: one off is wrong, however large they are
            outcome = "fail" if size or observed.dtype == expected.dtype else "pass"
        if outcome == "unknown" and base is not None and size <= allowed.moved:
            # Counted as a comparison it would name a parameter as wrong, of which nothing is known.
            self.leave_out(place.law, [str(place.parameter)], _MADE_MUCH_OF)
            return
        self._differ(place, size, outcome, allowed, partial(sizes, observed, expected, base))

    def sketches(
        self,
        place: Mismatch,
        observed: Sketch,
        expected: Sketch,
        floor: Callable[[], Floor],
        *,
        base: tuple[Sketch, Sketch] | None = None,
        stored: float = 0.0,
    ) -> None:
        """Compare two tensors by sketches from ``brief``. ``stored``: distance that storage rounding may add.

        ``base``: both starting points. Movements are then compared as one large tensor whose few elements may be far
        off, since optimizers amplify rounding in single elements.
        """
        # Equal digests stand for equal bits. Of weights that both stood still, each where it was, the starts decide.
        still = base is not None and (observed.digest, expected.digest) == (base[0].digest, base[1].digest)
        if observed.digest == expected.digest or still:
            self._agree(place, lambda: bool(expected.norm))
            return
        if not (math.isfinite(observed.norm) or math.isfinite(expected.norm)):  # as in a step that overflows
            self._enter(place, "pass")
            self.empty(place.law, ENDLESS)
            return
        allowed = floor()
        if base is not None:
            observed, expected = (one.minus(start) for one, start in zip((observed, expected), base, strict=True))
        size = observed.gap(expected) / allowed.size if allowed.noise else observed.distance(expected)
        outcome = allowed.outcome(size)
        if base is not None and outcome != "pass":
            gap, usual = observed.gap(expected), allowed.outcome(observed.usual_distance(expected))
            summed = FP64.least * base[1].norm  # error in the sums behind a sketch
            passes = gap <= summed or (gap <= stored and usual == "pass")
            outcome = "pass" if passes else "unknown" if gap <= stored or usual != "fail" else outcome
        began = None if base is None else base[1].norm
        self._differ(place, size, outcome, allowed, partial(_brief_sizes, observed, expected, began))

    def estimate(self, place: Mismatch, size: float, allowed: Floor, found: str, expected: str) -> None:
        """Enter a lower bound ``size`` on a tensor's error. ``found`` and ``expected`` describe it."""
        self._enter(place, allowed.outcome(size), size=size, floor=allowed, observed=found, expected=expected)

    def numbers(self, place: Mismatch, observed: float, expected: float, floor: Callable[[], Floor]) -> None:
        """Compare two numbers."""
        if observed == expected:
            self._agree(place, observed=float(observed), expected=float(expected))
            return
        allowed = floor()
        base = allowed.size or abs(expected)  # a number from rounding alone is held to how large rounding makes it
        size = abs(observed - expected) / base if base else math.inf
        size = size if size == size else math.inf  # NaN is no number, and passes nowhere
        outcome, allowed = allowed.number(size)
        both = {"observed": float(observed), "expected": float(expected)}
        self._differ(place, size, outcome, allowed, lambda: (observed, expected), **both)

    def forget(self, laws: Sequence[str]) -> None:
        """Remove unused ``laws``: without comparisons and notes."""
        for law in laws:
            if law not in self._skipped and not (self._entries[law].checked or self._entries[law].notes):
                del self._entries[law]

    def empty(self, law: str, what: str) -> None:
        """Count a pass blind to faults; ``what`` describes it."""
        self._entries[law].empty[what] += 1

    def set_aside(self, found: Iterable[Mismatch], why: str) -> None:
        """Demote mismatches to remarks; the count stays."""
        found = tuple(found)
        for law in dict.fromkeys(one.law for one in found):
            those = [one for one in found if one.law == law]
            differ = f"{len(those)} differ{'s' * (len(those) == 1)} from the reference, and {why}"
            self.remark(law, f"{differ}: first {those[0].where}: {those[0].observed_text}")
        for one in found:
            self.mismatches.remove(one)
            for entry in self._under(one):
                entry.wrong, entry.aside = entry.wrong - 1, entry.aside + 1
                if not entry.wrong:  # what is left agrees, so that no error of this law counts
                    entry.outcomes.discard("fail")
                    entry.worst = entry.floor = 0.0

    def join(self, other: "Ledger") -> None:
        """Merge another rank's ledger."""
        for law, theirs in other._entries.items():
            self._entries[law].add(theirs)
        self._skipped |= other._skipped
        self._precisions |= other._precisions
        self.mismatches += other.mismatches
        self.compared |= other.compared

    def laws(self) -> tuple[LawResult, ...]:
        """Return each law's outcome, in declared order."""
        return tuple(self._law(name, entry) for name, entry in self._entries.items())

    @property
    def all_exact(self) -> bool:
        """True if all deciding comparisons held bit for bit."""
        return all(entry.exact + entry.aside == entry.checked for entry in self._entries.values())

    def tier(self, otherwise: Precision) -> Tier:
        """Return the tier for a pass. ``otherwise``: the precision if no comparison implies it."""
        return "bitwise" if self.all_exact else coarsest([*self._precisions] or [otherwise]).name

    def _law(self, name: str, entry: _Entry) -> LawResult:
        if name in self._skipped:
            skipped, reason = self._skipped[name]
            return LawResult(name, skipped, note=reason, reasons=reasons_of(reason))
        agree = (losses := self._entries.get("loss", _Entry())).checked == losses.exact > 0
        failed = "fail" in entry.outcomes
        # A proven fault may make all gradients too large: then that is no further doubt.
        doubt = [] if failed else doubts(entry.leads, losses_agree=agree)
        nothing = entry.checked == entry.empty.total()  # no comparison, or none that can reveal a fault
        unknown = not failed and bool(doubt or nothing or "unknown" in entry.outcomes)
        empty = [f"{count} of them {'is' if count == 1 else 'are'} {what}" for what, count in entry.empty.items()]
        note = "; ".join([*doubt, *entry.notes, *empty]) or ("" if entry.checked else "nothing was compared")
        counts = entry.checked, entry.exact, entry.wrong, entry.worst, entry.floor
        otherwise = reasons_of(*entry.notes, *entry.empty) or (
            Reason.ROUNDING if entry.wrong or doubt else Reason.NOTHING,
        )
        reasons = tuple(entry.reasons) or otherwise * unknown
        outcome: Outcome = "fail" if failed else "unknown" if unknown else "pass"
        return LawResult(name, outcome, *counts, note, tuple(entry.left_out), reasons)

    def _under(self, place: Mismatch) -> list[_Entry]:
        """Return the entries of a comparison's law, and of laws about its operation's place in the plan."""
        scenarios = self.scenarios[place.operation - 1] if self.scenarios else ()
        return [self._entries[law] for law in {place.law, *scenarios}]

    def _agree(self, place: Mismatch, nonzero: Callable[[], bool] = lambda: False, **both: float) -> None:
        """Enter equal bits. ``nonzero``: whether a factor would show; ``both``: the numbers, if they are no tensors."""
        self._enter(place, "pass", exact=True)
        self._keep(place, "pass", **both)
        if place.law == _GRADIENT and nonzero():
            self._entries[_GRADIENT].leads.add(Lead.of(_compared(place), 1.0))

    def _differ(
        self,
        place: Mismatch,
        size: float,
        outcome: str,
        allowed: Floor,
        values: Callable[[], tuple[Value, Value]],
        **both: float,
    ) -> None:
        """Enter unequal bits, with relative error ``size``. ``values`` gives both sides; ``both``: as in ``_agree``."""
        stride = allowed.stride and size > allowed.limit
        if outcome == "pass" and (allowed.noise or stride):
            self.empty(place.law, _STRIDE if stride else _DRIVEN if allowed.driven else _NOISE)
            size = 0.0  # what passes by rounding never becomes the largest error
        summed = bool(both) and place.microbatch is None  # a sum may come right by chance
        narrow = allowed.precision.unit > FP32.unit and size > FP32.least
        if outcome == "pass" and place.law in self.held and narrow and not summed:
            self.remark(place.law, HELD.format(allowed.precision.name))
            outcome = "unknown"
        leads = place.law == _GRADIENT and outcome != "fail" and not allowed.noise
        found, expected = values() if leads or outcome != "pass" else ("", "")  # they take a pass over both tensors
        what: What = "number" if both else "tensor"
        self._enter(place, outcome, size=size, floor=allowed, observed=found, expected=expected, what=what)
        self._keep(place, outcome, error=size, floor=allowed.largest, limit=allowed.limit or None, **both)
        if leads and isinstance(found, Size) and found.factor is not None:
            self._entries[_GRADIENT].leads.add(Lead.of(_compared(place), found.factor, allowed))

    def _enter(
        self,
        place: Mismatch,
        outcome: str,
        *,
        exact: bool = False,
        size: float = 0.0,
        floor: Floor | None = None,
        **values: Any,
    ) -> None:
        """Count a comparison under its laws, and keep a mismatch with these ``values`` unless it passes."""
        if outcome == "pass" and floor is not None:
            self._precisions.setdefault(floor.precision)
        for entry in self._under(place):
            entry.checked += 1
            entry.exact += exact
            entry.wrong += outcome != "pass"
            entry.outcomes.add(outcome)
            entry.entered.add(_compared(place))
            if floor is not None and size > entry.worst:
                entry.worst, entry.floor = size, floor.largest
        if outcome != "pass" and place.law not in self._skipped:  # a half-observed law proves no fault
            values |= {} if floor is None else {"error": size, "limit": floor.limit or None}
            self.mismatches.append(replace(place, **values))

    def _keep(self, place: Mismatch, outcome: str, **numbers: Any) -> None:
        """Store a comparison's numbers, for laws with entries per item."""
        if place.law in _KEPT:
            where = place.rank, place.stage, place.microbatch, place.parameter
            self.compared[place.law, *where] = Compared(place.law, place.operation, outcome, *where, **numbers)


def _compared(place: Mismatch) -> tuple[int, str | int | None]:
    """Return the operation, with its parameter or microbatch."""
    return place.operation, place.microbatch if place.parameter is None else place.parameter


def _brief_sizes(observed: Sketch, expected: Sketch, began: float | None) -> tuple[Size, Size]:
    """Describe two sketches, as ``sizes`` does."""
    if observed.shape != expected.shape:
        return Size(observed.shape), Size(expected.shape)
    cosine = observed.cosine(expected)
    factor = None if cosine is None else cosine * observed.norm / expected.norm
    return Size(observed.shape, observed.norm, began, factor, cosine), Size(expected.shape, expected.norm, began)


_NOISE = Reason.ROUNDING.doubt("expected to be zero up to rounding: a fault would not show there")
_DRIVEN = Reason.ROUNDING.doubt("driven by rounding as far as faults would: none shows there")
_STRIDE = Reason.ROUNDING.doubt("made from rounding alone, so that only the length was compared")
_MADE_MUCH_OF = Reason.ROUNDING.doubt("off by no more than the optimizer makes of rounding in gradients")
NOWHERE = -1  # stage number for parameters outside all stages
