"""The ledger of a validation: every comparison made, where it stands, and under which laws it is entered."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from pipeproof.core.leads import Leads
from pipeproof.core.limits import FP32, FP64, Precision
from pipeproof.core.measured import Compared
from pipeproof.core.observe.elements import any_nonzero, is_rounded
from pipeproof.core.observe.sketch import Sketch
from pipeproof.core.reason import Doubt, Reason, reasons_of
from pipeproof.core.sizes import brief_sizes, sizes
from pipeproof.core.tolerance import Floor, same_bits
from pipeproof.core.verdict import LawResult, Mismatch, Outcome, Size, Tier, Value, What
from pipeproof.pipeline.sizes import first_few

HELD = "what came before was bit for bit, so that rounding in {} does not excuse this"
ENDLESS = Reason.NOT_FINITE.doubt("not finite on either side: no fault shows there")
_GRADIENT = "gradient"
COMPUTED = ("loss", _GRADIENT)  # laws of what every microbatch gives
_KEPT = (*COMPUTED, "grad-norm")  # laws whose comparisons are kept one by one


@dataclass
class _Entry:
    checked: int = 0
    exact: int = 0
    wrong: int = 0
    aside: int = 0  # of what is not exact, how many decide nothing
    empty: Counter[str] = field(default_factory=Counter)  # of what passed, in what no fault shows: how many are what
    worst: float = 0.0
    floor: float = 0.0
    outcomes: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)
    entered: set[tuple[int, str | int | None]] = field(default_factory=set)  # Heading.compared of what was compared
    left_out: dict[str, None] = field(default_factory=dict)
    reasons: dict[Reason, None] = field(default_factory=dict)
    leads: Leads = field(default_factory=Leads)  # of gradients that are no fault each for itself

    def add(self, other: "_Entry") -> None:
        self.checked += other.checked
        self.exact += other.exact
        self.wrong += other.wrong
        self.aside += other.aside
        self.empty += other.empty
        if other.worst > self.worst:
            self.worst, self.floor = other.worst, other.floor
        self.outcomes |= other.outcomes
        self.notes += [note for note in other.notes if note not in self.notes]
        self.entered |= other.entered
        self.left_out |= other.left_out
        self.reasons |= other.reasons
        self.leads = self.leads.joined(other.leads)


@dataclass(frozen=True)
class Heading:
    """Where a comparison belongs: its law, the laws of its scenarios, and the known parts of a mismatch."""

    law: str
    scenarios: frozenset[str]
    where: Mismatch

    @classmethod
    def at(cls, law: str, number: int, scenarios: frozenset[str] = frozenset(), **where: object) -> "Heading":
        """In operation ``number``, from 0, at what ``where`` names as the fields of a mismatch."""
        return cls(law, scenarios, Mismatch(law, number + 1, **where))  # type: ignore[arg-type]

    def mismatch(self, found: Value, due: Value, what: What, **more: Any) -> Mismatch:
        """This place, with what was found there and what was due."""
        return replace(self.where, law=self.law, found=found, due=due, what=what, **more)

    @property
    def compared(self) -> tuple[int, str | int | None]:
        """What is compared: the operation, and a parameter or microbatch in it."""
        where = self.where
        return where.operation, where.microbatch if where.parameter is None else where.parameter


class Ledger:
    """Collects comparisons. Laws that nothing was entered under stay "unknown", unless said not to apply."""

    def __init__(self, laws: Sequence[str]) -> None:
        self._entries = {law: _Entry() for law in laws}
        self._skipped: dict[str, tuple[Outcome, str]] = {}
        self._coarsest: Precision | None = None  # of what agreed, but not bit for bit
        self.held: frozenset[str] = frozenset()  # laws whose rounding no narrow type excuses
        self.mismatches: list[Mismatch] = []
        self.compared: dict[tuple[object, ...], Compared] = {}  # by its place: of several operations the last

    def empty_copy(self) -> "Ledger":
        """A ledger of the same laws, without anything compared: of these the same do not apply, or were not seen."""
        copy = Ledger([*self._entries])
        copy._skipped, copy.held = dict(self._skipped), self.held
        return copy

    @property
    def failed(self) -> bool:
        """Whether anything so far did not agree."""
        return any(one.outcomes & {"fail", "unknown"} for law, one in self._entries.items() if law not in self._skipped)

    @property
    def exact(self) -> frozenset[str]:
        """The laws of what every microbatch gives, if all under these was bit for bit so far."""
        own = {law: self._entries[law] for law in COMPUTED if law in self._entries and self._entries[law].checked}
        return frozenset(own) if all(entry.exact == entry.checked for entry in own.values()) else frozenset()

    def undecided(self, law: str) -> bool:
        """Whether some of what was compared under ``law`` is neither right nor wrong, and nothing is wrong."""
        outcomes = self._entries[law].outcomes
        return "unknown" in outcomes and "fail" not in outcomes

    def skip(self, law: str, reason: str) -> None:
        """``law`` does not apply here."""
        self._skipped[law] = "not applicable", reason

    def miss(self, law: str, why: str) -> None:
        """``law`` may well apply, but nothing was seen of what it is about."""
        self._skipped[law] = "not seen", Reason.UNREPORTED.doubt(why)

    def doubt(self, law: str, why: str, reason: Reason = Reason.UNCOMPARED) -> None:
        """``law`` cannot be judged: it says nothing that it was not seen to fail. ``reason``: if ``why`` has none."""
        self._entries[law].outcomes.add("unknown")
        self._entries[law].reasons |= dict.fromkeys(reason.doubt(why).reasons)
        self.remark(law, why)

    def remark(self, law: str, note: str) -> None:
        """Something about ``law`` that readers should know, and that changes no outcome."""
        if note not in self._entries[law].notes:
            self._entries[law].notes.append(note)

    def leave_out(
        self, law: str, names: Sequence[str], why: str, reason: Reason = Reason.UNCOMPARED, *, hides: bool = True
    ) -> None:
        """``names`` should have been compared under ``law`` and were not; ``hides``: a fault may be in that."""
        if names:
            self._entries[law].left_out |= dict.fromkeys(names)
            told = Doubt(f"{why}: {first_few(names)}", reason.doubt(why).reasons)
            (self.doubt if hides else self.remark)(law, told)

    def entered(self, law: str, number: int) -> set[str | int | None]:
        """Which parameters, or microbatches, of operation ``number`` (from 0) were compared under ``law``."""
        return {what for operation, what in self._entries[law].entered if operation == number + 1}

    def hold(
        self,
        place: Heading,
        holds: bool,
        found: Value,
        due: Value,
        *,
        what: What = "text",
        exact: bool = True,
        told: str = "",
    ) -> None:
        """Enter a comparison that either holds or fails; ``exact``: if it holds, it does so bit for bit."""
        self._enter(place, "pass" if holds else "fail", exact=holds and exact)
        if not holds:
            self._differ(place.mismatch(found, due, what, told=told))

    def tensors(
        self,
        place: Heading,
        observed: Tensor,
        expected: Tensor,
        floor: Callable[[], Floor],
        *,
        base: Tensor | None = None,
        rounded: bool = False,
    ) -> None:
        """Enter two tensors. ``base``: judge their differences from it, relative to how far expected moved.

        ``rounded``: let pass what storing may have done to last places.
        """
        if same_bits(observed, expected):
            self._enter(place, "pass", exact=True)
            self._keep(place, "pass")
            self._lead(place, lambda: 1.0 if any_nonzero(expected) else None)
            return
        allowed = floor()
        size, outcome = allowed.compared(observed, expected, base=base, rounded=rounded)
        allowed = allowed.reached(size, outcome)
        if not is_rounded(expected.dtype):  # a count that is one off is no rounding, however large it is
            outcome = "fail" if size or observed.dtype == expected.dtype else "pass"
        if outcome == "unknown" and base is not None and size <= allowed.moved:
            self.leave_out(place.law, [str(place.where.parameter)], _MADE_MUCH_OF)
            return
        self._sized(place, size, outcome, allowed, lambda: sizes(observed, expected, base))

    def sketches(
        self,
        place: Heading,
        observed: Sketch,
        expected: Sketch,
        floor: Callable[[], Floor],
        *,
        base: tuple[Sketch, Sketch] | None = None,
        stored: float = 0.0,
    ) -> None:
        """Enter two tensors of which there are sketches by ``brief``.

        ``base``: what each of them moved from; then the movements are judged, as one large tensor whose few elements
        may be far off: optimizers make much of rounding in single ones. ``stored``: how far apart storing may put them.
        """
        still = base is not None and (observed.digest, expected.digest) == (base[0].digest, base[1].digest)
        if observed.digest == expected.digest or still:
            self._enter(place, "pass", exact=True)
            self._keep(place, "pass")
            self._lead(place, lambda: 1.0 if expected.norm else None)
            return
        if not (math.isfinite(observed.norm) or math.isfinite(expected.norm)):
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
            summed = FP64.least * base[1].norm  # what sums lose that sketches are made by
            passes = gap <= summed or (gap <= stored and usual == "pass")
            outcome = "pass" if passes else "unknown" if gap <= stored or usual != "fail" else outcome
        began = None if base is None else base[1].norm
        self._sized(place, size, outcome, allowed, lambda: brief_sizes(observed, expected, began))

    def _sized(
        self, place: Heading, size: float, outcome: str, allowed: Floor, sizes: Callable[[], tuple[Size, Size]]
    ) -> None:
        """Enter two tensors that are ``size`` apart; ``sizes`` says them in numbers, where they do not agree."""
        size = self._blind(place, allowed, size, outcome)
        if outcome == "pass" and self._is_held(place, size, allowed):
            outcome = "unknown"
        self._enter(place, outcome, size=size, floor=allowed)
        limit = allowed.limit or None
        self._keep(place, outcome, error=size, floor=allowed.largest, limit=limit)
        if outcome != "pass":
            self._differ(place.mismatch(*sizes(), "tensor", error=size, limit=limit))
        if outcome != "fail":
            self._lead(place, lambda: sizes()[0].factor, allowed)

    def _lead(self, place: Heading, factor: Callable[[], float | None], floor: Floor | None = None) -> None:
        """Note how many times what is due a gradient is, which is no fault for itself."""
        if place.law == _GRADIENT:
            entry = self._entries[_GRADIENT]
            entry.leads = entry.leads.joined(Leads.one(place.compared, factor(), floor))

    def estimate(self, place: Heading, size: float, allowed: Floor, found: str, due: str) -> None:
        """Enter what shows that a tensor is off by ``size`` at least; ``found`` and ``due`` say by what."""
        outcome = allowed.outcome(size)
        self._enter(place, outcome, size=size, floor=allowed)
        if outcome != "pass":
            self._differ(place.mismatch(found, due, "text", error=size, limit=allowed.limit or None))

    def numbers(self, place: Heading, observed: float, expected: float, floor: Callable[[], Floor]) -> None:
        """Enter two numbers."""
        told = {"found": float(observed), "due": float(expected)}
        if observed == expected:
            self._enter(place, "pass", exact=True)
            self._keep(place, "pass", **told)
            return
        allowed = floor()
        base = allowed.size or abs(expected)
        size = abs(observed - expected) / base if base else float("inf")
        size = size if size == size else float("inf")
        outcome = allowed.number(size)
        allowed = allowed.reached(size, outcome)
        size = self._blind(place, allowed, size, outcome)
        if outcome == "pass" and place.where.microbatch is not None and self._is_held(place, size, allowed):
            outcome = "unknown"
        self._enter(place, outcome, size=size, floor=allowed)
        self._keep(place, outcome, error=size, floor=allowed.largest, limit=allowed.limit, **told)
        if outcome != "pass":
            self._differ(place.mismatch(observed, expected, "number", error=size, limit=allowed.limit or None))

    def forget(self, laws: Sequence[str]) -> None:
        """Take out those of ``laws`` of which nothing at all was said."""
        for law in laws:
            if law not in self._skipped and not (self._entries[law].checked or self._entries[law].notes):
                del self._entries[law]

    def empty(self, law: str, what: str, count: int = 1) -> None:
        """So many of the comparisons under ``law`` passed, and are ``what`` can show no fault."""
        self._entries[law].empty[what] += count

    def _blind(self, place: Heading, allowed: Floor, size: float, outcome: str) -> float:
        """The error of a comparison; 0 of what passed as rounding: the largest is not sought of such."""
        stride = allowed.stride and size > allowed.limit
        if outcome != "pass" or not (allowed.noise or stride):
            return size
        self.empty(place.law, _STRIDE if stride else _DRIVEN if allowed.driven else _NOISE)
        return 0.0

    def _is_held(self, place: Heading, size: float, allowed: Floor) -> bool:
        """Whether only a type narrower than fp32 lets it pass, where all that came before was bit for bit."""
        narrow = allowed.precision.unit > FP32.unit and size > FP32.least
        held = place.law in self.held and narrow and not allowed.noise
        if held:
            self.remark(place.law, HELD.format(allowed.precision.name))
        return held

    def set_aside(self, found: Sequence[Mismatch], scenarios: Sequence[frozenset[str]], why: str) -> None:
        """Let mismatches decide nothing: they stay counted, and are told as a remark.

        ``scenarios``: of each operation of the plan, the laws about its place, under which they were entered, too.
        """
        for law in dict.fromkeys(one.law for one in found):
            those = [one for one in found if one.law == law]
            differ = f"{len(those)} differ{'s' * (len(those) == 1)} from the reference, and {why}"
            self.remark(law, f"{differ}: first {those[0].where}: {those[0].seen}")
        for one in tuple(found):
            self.mismatches.remove(one)
            for entry in (self._entries[law] for law in {one.law, *scenarios[one.operation - 1]}):
                entry.wrong, entry.aside = entry.wrong - 1, entry.aside + 1
                if not entry.wrong:
                    entry.outcomes.discard("fail")
                    entry.worst = entry.floor = 0.0

    def join(self, other: "Ledger") -> None:
        """Add all that another rank's ledger has."""
        for law, theirs in other._entries.items():
            self._entries[law].add(theirs)
        self._skipped |= other._skipped
        self._reach(other._coarsest)
        self.mismatches += other.mismatches
        self.compared |= other.compared

    def laws(self) -> tuple[LawResult, ...]:
        """Every law's outcome, in the order given at the start."""
        return tuple(self._law(name, entry) for name, entry in self._entries.items())

    @property
    def all_exact(self) -> bool:
        """Whether every comparison held bit for bit, of those that decide."""
        return all(entry.exact + entry.aside == entry.checked for entry in self._entries.values())

    def tier(self, otherwise: Precision) -> Tier:
        """To what everything that agreed did; ``otherwise``, where nothing tells how what is not exact is rounded."""
        return "bitwise" if self.all_exact else (self._coarsest or otherwise).name

    def _law(self, name: str, entry: _Entry) -> LawResult:
        if name in self._skipped:
            skipped, reason = self._skipped[name]
            return LawResult(name, skipped, note=reason, reasons=reasons_of(reason))
        agree = (losses := self._entries.get("loss", _Entry())).checked == losses.exact > 0
        failed = "fail" in entry.outcomes
        doubt = [] if failed else entry.leads.doubts(losses_agree=agree)
        nothing = entry.checked == entry.empty.total()  # at all, or nothing in which a fault shows
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

    def _enter(
        self, place: Heading, outcome: str, *, exact: bool = False, size: float = 0.0, floor: Floor | None = None
    ) -> None:
        if outcome == "pass" and floor is not None:
            self._reach(floor.precision)
        for law in {place.law, *place.scenarios}:
            entry = self._entries[law]
            entry.checked += 1
            entry.exact += exact
            entry.wrong += outcome != "pass"
            entry.outcomes.add(outcome)
            entry.entered.add(place.compared)
            if floor is not None and size > entry.worst:
                entry.worst, entry.floor = size, floor.largest

    def _differ(self, mismatch: Mismatch) -> None:
        self.mismatches += [] if mismatch.law in self._skipped else [mismatch]  # half that was seen shows no fault

    def _keep(self, place: Heading, outcome: str, **numbers: Any) -> None:
        """Keep the numbers of a comparison, if they are of a kind that readers ask for one by one."""
        if place.law in _KEPT:
            at = place.where
            where = at.rank, at.stage, at.microbatch, at.parameter
            self.compared[place.law, *where] = replace(Compared(place.law, at.operation, outcome, *where), **numbers)

    def _reach(self, precision: Precision | None) -> None:
        if precision is not None and (self._coarsest is None or precision.unit > self._coarsest.unit):
            self._coarsest = precision


_NOISE = Reason.ROUNDING.doubt("expected to be zero up to rounding: a fault would not show there")
_DRIVEN = Reason.ROUNDING.doubt("driven by rounding as far as faults would: none shows there")
_STRIDE = Reason.ROUNDING.doubt("made from rounding alone, so that only the length was compared")
_MADE_MUCH_OF = Reason.ROUNDING.doubt("off by no more than the optimizer makes of rounding in gradients")
NOWHERE = -1  # the stage of a parameter that no stage holds
