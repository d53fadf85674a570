"""The ledger of a validation: every comparison made, entered under the laws that it bears on."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from validation.judging.tolerance import Floor, error, pieces, same_bits
from validation.judging.verdict import LawResult, Mismatch, Outcome


@dataclass
class _Entry:
    checked: int = 0
    exact: int = 0
    wrong: int = 0
    worst: float = 0.0
    floor: float = 0.0
    outcomes: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def add(self, other: "_Entry") -> None:
        self.checked += other.checked
        self.exact += other.exact
        self.wrong += other.wrong
        if other.worst > self.worst:
            self.worst, self.floor = other.worst, other.floor
        self.outcomes |= other.outcomes
        self.notes += [note for note in other.notes if note not in self.notes]


@dataclass(frozen=True)
class Heading:
    """Where a comparison belongs: its law, the laws of its scenarios, and the known parts of a mismatch."""

    law: str
    scenarios: frozenset[str]
    where: Mismatch

    def mismatch(self, seen: str, expected: str, *, size: float | None = None, limit: float | None = None) -> Mismatch:
        """This place, with what was seen there."""
        return replace(self.where, law=self.law, seen=seen, expected=expected, error=size, limit=limit)


class Ledger:
    """Collects comparisons. Laws that nothing was entered under stay "unknown", unless said not to apply."""

    def __init__(self, laws: Sequence[str]) -> None:
        self._entries = {law: _Entry() for law in laws}
        self._not_applicable: dict[str, str] = {}
        self.mismatches: list[Mismatch] = []

    @property
    def failed(self) -> bool:
        """Whether anything so far did not agree."""
        return any(entry.outcomes & {"fail", "unknown"} for entry in self._entries.values())

    def skip(self, law: str, reason: str) -> None:
        """``law`` does not apply here."""
        self._not_applicable[law] = reason

    def doubt(self, law: str, reason: str) -> None:
        """``law`` cannot be judged: it says nothing that it was not seen to fail."""
        self._entries[law].outcomes.add("unknown")
        self._entries[law].notes.append(reason)

    def remark(self, law: str, note: str) -> None:
        """Something about ``law`` that readers should know, and that changes no outcome."""
        self._entries[law].notes.append(note)

    def hold(self, place: Heading, holds: bool, seen: str, expected: str, *, exact: bool = True) -> None:
        """Enter a comparison that either holds or fails; ``exact``: if it holds, it does so bit for bit."""
        self._enter(place, "pass" if holds else "fail", exact=holds and exact)
        if not holds:
            self.mismatches.append(place.mismatch(seen, expected))

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

        ``rounded``: let pass what storing them may have done to their last places.
        """
        if same_bits(observed, expected):
            self._enter(place, "pass", exact=True)
            return
        size, allowed = error(observed, expected, base=base, rounded=rounded), floor()
        outcome = allowed.outcome(size)
        self._enter(place, outcome, size=size, floor=allowed.largest)
        if outcome != "pass":
            seen, wanted = _describe(observed, expected, base)
            self.mismatches.append(place.mismatch(seen, wanted, size=size, limit=allowed.limit))

    def numbers(self, place: Heading, observed: float, expected: float, floor: Callable[[], Floor]) -> None:
        """Enter two numbers."""
        if observed == expected:
            self._enter(place, "pass", exact=True)
            return
        size = abs(observed - expected) / abs(expected) if expected else float("inf")
        size, allowed = (size if size == size else float("inf")), floor()
        outcome = allowed.outcome(size)
        self._enter(place, outcome, size=size, floor=allowed.largest)
        if outcome != "pass":
            self.mismatches.append(place.mismatch(f"{observed:.9g}", f"{expected:.9g}", size=size, limit=allowed.limit))

    def strike(self, struck: Sequence[Mismatch]) -> None:
        """Take mismatches of laws without scenarios out again: what they say turned out to be no fault."""
        for one in struck:
            self.mismatches.remove(one)
            entry = self._entries[one.law]
            entry.checked, entry.wrong = entry.checked - 1, entry.wrong - 1
            if not entry.wrong:
                entry.outcomes.discard("fail")

    def join(self, other: "Ledger") -> None:
        """Add all that another rank's ledger has."""
        for law, theirs in other._entries.items():
            self._entries[law].add(theirs)
        self._not_applicable |= other._not_applicable
        self.mismatches += other.mismatches

    def laws(self) -> tuple[LawResult, ...]:
        """Every law's outcome, in the order given at the start."""
        return tuple(self._law(name, entry) for name, entry in self._entries.items())

    @property
    def all_exact(self) -> bool:
        """Whether every comparison held bit for bit."""
        return all(entry.exact == entry.checked for entry in self._entries.values())

    def _law(self, name: str, entry: _Entry) -> LawResult:
        if name in self._not_applicable:
            return LawResult(name, "not applicable", note=self._not_applicable[name])
        outcome: Outcome = "pass"
        if "fail" in entry.outcomes:
            outcome = "fail"
        elif "unknown" in entry.outcomes or not entry.checked:
            outcome = "unknown"
        note = "; ".join(entry.notes) or ("" if entry.checked else "nothing was compared")
        return LawResult(name, outcome, entry.checked, entry.exact, entry.wrong, entry.worst, entry.floor, note)

    def _enter(
        self, place: Heading, outcome: str, *, exact: bool = False, size: float = 0.0, floor: float = 0.0
    ) -> None:
        for law in (place.law, *place.scenarios):
            entry = self._entries[law]
            entry.checked += 1
            entry.exact += exact
            entry.wrong += outcome != "pass"
            entry.outcomes.add(outcome)
            if size > entry.worst:
                entry.worst, entry.floor = size, floor


def _describe(observed: Tensor, expected: Tensor, base: Tensor | None) -> tuple[str, str]:
    """Two tensors in words: norms, and how much of the observed one is the expected one."""
    if observed.shape != expected.shape:
        return f"shape {list(observed.shape)}", f"shape {list(expected.shape)}"
    sums = torch.zeros(3, dtype=torch.float64)  # of squares of what was seen, of what was expected, and of products
    for one, other, *origin in pieces(observed, expected, *([] if base is None else [base])):
        seen, wanted = (one - origin[0], other - origin[0]) if origin else (one, other)
        sums += torch.stack([(seen * seen).sum(), (wanted * wanted).sum(), (seen * wanted).sum()])
    product = sums[2].item()
    seen_norm, wanted_norm = sums[:2].sqrt().tolist()
    what, likeness = "norm" if base is None else "update of norm", ""
    if seen_norm and wanted_norm:  # not their product: beside a NaN it does not show that the other is zero
        along = product / wanted_norm
        likeness = f", {along / wanted_norm:.6g} times expected, cosine {along / seen_norm:.6f}"
    return f"{what} {seen_norm:.6g}{likeness}", f"{what} {wanted_norm:.6g}"
