"""The verdict as data: what was compared, what broke, and what to type next."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

SCHEMA = "pipeproof/verdict/1"
Tier = Literal["bitwise", "fp32", "none"]
Outcome = Literal["pass", "fail", "unknown", "not applicable"]

_SHOWN = 6  # mismatches on a screen; the rest are counted
EXIT_STATUS: Mapping[str, int] = {"pass": 0, "fail": 1, "unknown": 3}


class ValidationFailed(AssertionError):
    """A verdict that is not a pass; ``verdict`` holds it."""

    def __init__(self, verdict: "Verdict") -> None:
        super().__init__(str(verdict))
        self.verdict = verdict


@dataclass(frozen=True)
class Mismatch:
    """One thing that differs: where, what was seen, what was expected, and by how much it may differ.

    ``operation`` counts from 1 over the plan. Fields that do not apply are None.
    """

    law: str
    operation: int
    seen: str
    expected: str
    rank: int | None = None
    stage: int | None = None
    microbatch: int | None = None
    action: str | None = None
    parameter: str | None = None
    error: float | None = None
    limit: float | None = None

    @property
    def where(self) -> str:
        """Rank, stage, microbatch, action and parameter, as far as they are known."""
        parts = [
            f"{name} {value}"
            for name, value in (
                ("rank", self.rank),
                ("stage", self.stage),
                ("microbatch", self.microbatch),
                ("action", self.action),
                ("parameter", self.parameter),
            )
            if value is not None
        ]
        return ", ".join(parts) or "every rank"

    @property
    def allowance(self) -> str:
        """How large the error is, and how large it might be; empty where that was no question of size."""
        if self.error is None or self.limit is None:
            return ""
        return f"; relative error {small(self.error)}, rounding allows {small(self.limit)}"

    def __str__(self) -> str:
        return f"{self.law}: {self.where}: {self.seen} (expected {self.expected})"


@dataclass(frozen=True)
class LawResult:
    """A property that must hold, and how it fared.

    ``checked`` things were compared, ``exact`` of them agreed bit for bit, ``wrong`` of them did not agree.
    """

    name: str
    outcome: Outcome
    checked: int = 0
    exact: int = 0
    wrong: int = 0
    worst: float = 0.0
    floor: float = 0.0
    note: str = ""

    def __str__(self) -> str:
        exact = f"{self.checked} compared, {self.exact} bit for bit" if self.checked else ""
        worst = f"worst {small(self.worst)}" if self.worst else ""
        details = ", ".join(text for text in (exact, worst, self.note) if text)
        return f"{self.name:<18} {self.outcome:<14} {details}".rstrip()


@dataclass(frozen=True)
class Verdict:
    """What a validation found. ``tier`` is "bitwise", "fp32", or "none" where not everything agreed.

    ``floor`` is the largest rounding floor measured over all gradients, 0 where none was measured; ``failure`` is how
    the ranks failed where there was nothing to judge; ``seconds`` is what it took. ``rerun``
    is what to type where there is no replay line.
    """

    config: str
    verdict: Literal["pass", "fail", "unknown"]
    tier: Tier
    laws: tuple[LawResult, ...]
    mismatches: tuple[Mismatch, ...] = ()
    cause: str | None = None
    floor: float = 0.0
    failure: str = ""
    seconds: float = field(default=0.0, compare=False)
    rerun: str = ""

    @property
    def replay(self) -> str:
        """The line that runs this case again."""
        return self.rerun or f'pipeproof replay "{self.config}"'

    @property
    def exit_status(self) -> int:
        """0 pass, 1 wrong answer, 3 no verdict."""
        return EXIT_STATUS[self.verdict]

    def raise_if_failed(self) -> None:
        """Raise ``ValidationFailed``, with the whole screen as its text, unless this is a pass."""
        if self.verdict != "pass":
            raise ValidationFailed(self)

    def law(self, name: str) -> LawResult:
        """The law called ``name``. Raises KeyError if it was not judged."""
        return {law.name: law for law in self.laws}[name]

    def __str__(self) -> str:
        """All that a reader needs, on one screen: where, seen, expected, the case, and what to type next."""
        rows = [f"{self.verdict.upper()} {self._headline()}", f"  case      {self.config}"]
        if self.failure:
            rows.append(self.failure)
        if self.mismatches:
            first = self.mismatches[0]
            rows += [
                f"  where     {first.where}; operation {first.operation} of the plan",
                f"  seen      {first.seen}",
                f"  expected  {first.expected}{first.allowance}",
            ]
        rows += [f"  then      {mismatch}" for mismatch in self.mismatches[1:_SHOWN]]
        if len(self.mismatches) > _SHOWN:
            rows.append(f"  then      and {len(self.mismatches) - _SHOWN} more")
        rows += [f"  {'laws' if k == 0 else '':<9} {law}" for k, law in enumerate(self.laws)]
        return "\n".join([*rows, f"  replay    {self.replay}"])

    def _headline(self) -> str:
        if self.failure:
            return "the ranks failed before there was anything to judge"
        if self.verdict == "pass":
            return f"{sum(law.checked for law in self.laws)} comparisons, {self.tier}"
        broken = [law for law in self.laws if law.outcome == self.verdict]
        if self.verdict == "fail":
            return ", ".join(f"{law.name} ({law.wrong} of {law.checked})" for law in broken)
        return "; ".join(f"{law.name}: {law.note}" if law.note else law.name for law in broken)

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        data = asdict(self)
        return {"schema": SCHEMA, **data, "replay": self.replay}


def overall(laws: Sequence[LawResult]) -> Literal["pass", "fail", "unknown"]:
    """Fail if any law fails; else unknown if any is, or if none was exercised; else pass."""
    outcomes = {law.outcome for law in laws}
    if "fail" in outcomes:
        return "fail"
    return "unknown" if "unknown" in outcomes or "pass" not in outcomes else "pass"


def small(value: float) -> str:
    """A relative error in two digits; 0 only for exactly nothing."""
    return "0" if value == 0 else f"{value:.1e}"
