"""Findings as data: comparisons, mismatches and explanations."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pipeproof.core.cause import Cause, Cells, RuledOut
from pipeproof.core.hints import hints
from pipeproof.core.measured import Measured
from pipeproof.core.mismatch import Mismatch, small
from pipeproof.core.observe.stack import Line
from pipeproof.core.reason import Reason

Tier = Literal["bitwise", "fp32", "TF32", "bf16", "fp16", "fp64", "none"]  # bit for bit, or up to a dtype's rounding
Outcome = Literal["pass", "fail", "unknown", "not observed", "not applicable"]
JUDGED = ("observed", "expected")
_UNJUDGED: Mapping[str, str] = {"pass": "same", "fail": "different", "wrong": "different"}


@dataclass(frozen=True)
class LawResult:
    """A law's result.

    checked: comparisons. exact: bit for bit agreements. wrong: disagreements. left_out: names that should have been
    compared and were not. reasons: why the result is unknown, or not observed.
    """

    name: str
    outcome: Outcome
    checked: int = 0
    exact: int = 0
    wrong: int = 0
    worst: float = 0.0
    floor: float = 0.0
    note: str = ""
    left_out: tuple[str, ...] = ()
    reasons: tuple[Reason, ...] = ()

    def __str__(self) -> str:
        return self.line(self.outcome)

    def line(self, outcome: str) -> str:
        """Format the result on one line; ``outcome`` is the word to print."""
        exact = f"{self.checked} compared, {self.exact} bit for bit" if self.checked else ""
        missed = f"{len(self.left_out)} not compared" if self.left_out else ""
        worst = f"worst {small(self.worst)}" if self.worst else ""
        details = ", ".join(text for text in (exact, missed, worst, self.note) if text)
        return f"{self.name:<18} {outcome:<14} {details}".rstrip()


@dataclass(frozen=True)
class Findings:
    """All findings from a validation.

    tier: "bitwise", a dtype's name, or "none" without full agreement. causes: the explanation, as a whole; empty if
    evidence decides nothing, as ``undecided`` says, or if no explanation ran. alternatives: other possible
    explanations, each whole, likeliest first. ruled_out: evidence that agreed on the way. cells: coefficients behind
    the causes. bindings: the case's numbers, in words. floor: largest gradient floor; 0 if unmeasured. failure: how
    ranks failed, if nothing could be judged; failed_at: user lines where the first rank failed; ranks: a line per rank.
    ended: "error" after a crash, "hang" after a hang. headline: a sentence beyond the laws. rerun: command to use
    without a replay line. seconds: duration. stopped: error during comparison. unsought: error during explanation.
    traceback: for either. measured: numbers. sides: names for observed and expected; for two runs, neither known to be
    right, the runs' names.
    """

    config: str
    outcome: Literal["pass", "fail", "unknown"]
    tier: Tier
    laws: tuple[LawResult, ...]
    mismatches: tuple[Mismatch, ...] = ()
    causes: tuple[Cause, ...] = ()
    alternatives: tuple[tuple[Cause, ...], ...] = ()
    ruled_out: tuple[RuledOut, ...] = ()
    undecided: tuple[str, ...] = ()
    cells: Cells | None = None
    bindings: str = ""
    floor: float = 0.0
    failure: str = ""
    failed_at: tuple[Line, ...] = ()
    ranks: tuple[str, ...] = ()
    headline: str = ""
    rerun: str = ""
    seconds: float = field(default=0.0, compare=False)
    stopped: str = ""
    unsought: str = ""
    traceback: str = field(default="", compare=False)
    ended: Literal["", "error", "hang"] = ""
    sides: tuple[str, str] = JUDGED
    measured: Measured = field(default=Measured(), compare=False, repr=False)

    @property
    def worst(self) -> float:
        """The largest relative error of anything that was compared."""
        return max((law.worst for law in self.laws), default=0.0)

    @property
    def over_rounding(self) -> float:
        """The largest error as a multiple of what rounding does to the same; 0 where every bit agrees."""
        found = (law.worst / law.floor if law.floor else math.inf for law in self.laws if law.worst)
        return max(found, default=0.0)

    @property
    def judged(self) -> bool:
        """True beside a reference: one side must be right."""
        return self.sides == JUDGED

    @property
    def word(self) -> str:
        """The outcome word for readers: a crash or a hang shows as such."""
        return self.ended or self.word_for(self.outcome)

    def word_for(self, outcome: str) -> str:
        """Return the word for ``outcome``. Two unjudged runs are same or different."""
        return outcome if self.judged else _UNJUDGED.get(outcome, outcome)

    @property
    def next(self) -> list[str]:
        """Next steps: hints for causes, or cures for unknowns."""
        if self.outcome == "pass" or (self.outcome == "fail" and self.causes):
            return [*hints(self.causes, self.measured)]
        outcomes = {"unknown"} if self.outcome == "unknown" else {"unknown", "not observed"}
        reasons = [reason for law in self.laws if law.outcome in outcomes for reason in law.reasons]
        return [*hints(self.causes, self.measured), *dict.fromkeys(reason.cure for reason in reasons)]

    @property
    def replay(self) -> str:
        """Command to run this case again."""
        return self.rerun or f'pipeproof replay "{self.config}"'
