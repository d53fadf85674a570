"""What a gate has seen: every case with its verdict, what was due, and the one status that follows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from validation.cases.case import Case
from validation.judging.verdict import Verdict

Group = Literal["table", "pinned", "fuzz", "planted"]
_ORDER = {"fail": 0, "unknown": 1, "pass": 2}


@dataclass(frozen=True)
class CaseResult:
    """One case of a gate. ``group``: from the table of schedules, named by its line, drawn, or with a planted fault."""

    group: Group
    case: Case
    verdict: Verdict

    @property
    def outcome(self) -> Literal["pass", "fail", "unknown"]:
        """What the case says of the gate: that a planted fault is caught is a pass, that it is not proves nothing."""
        if self.group == "planted":
            return "pass" if self.verdict.verdict == "fail" else "unknown"
        return self.verdict.verdict

    @property
    def headline(self) -> str:
        """The outcome on one line."""
        if self.group == "planted":
            caught = "is caught" if self.outcome == "pass" else f"is not caught: {self.verdict.verdict}"
            return f"the planted fault {self.case.specimen} {caught}"
        return str(self.verdict).partition("\n")[0]

    @property
    def story(self) -> str:
        """The whole screen."""
        return str(self.verdict) if self.group != "planted" or self.outcome != "pass" else self.headline


@dataclass(frozen=True)
class GateResult:
    """What a gate found. ``due`` is how many cases it was asked for; ``missing`` says why some did not run."""

    cases: Sequence[CaseResult]
    due: int
    seed: int
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def short(self) -> str:
        """That fewer cases ran than should have, in a sentence; empty if all did."""
        if len(self.cases) >= self.due and not self.missing:
            return ""
        reasons = "".join(f"; {name}: {reason}" for name, reason in self.missing.items())
        return f"{len(self.cases)} of {self.due} cases ran{reasons}"

    @property
    def status(self) -> int:
        """The exit status: 1 if anything is wrong; 3 if anything is unknown or did not run; else 0."""
        if any(one.outcome == "fail" for one in self.cases):
            return 1
        return 3 if self.short or any(one.outcome != "pass" for one in self.cases) else 0

    @property
    def not_passed(self) -> list[CaseResult]:
        """The cases that are no pass, the culprit first: what is wrong, and of that the smallest."""
        found = [one for one in self.cases if one.outcome != "pass"]
        return sorted(found, key=lambda one: (_ORDER[one.outcome], one.case.stages, one.case.microbatches))

    def __str__(self) -> str:
        counts = {outcome: sum(one.outcome == outcome for one in self.cases) for outcome in _ORDER}
        said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items() if count or outcome == "pass")
        word = {0: "PASS", 1: "FAIL", 3: "UNKNOWN"}[self.status]
        return f"gate {word}: {said} of {self.due} cases; seed {self.seed}" + (f"; {self.short}" if self.short else "")
