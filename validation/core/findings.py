"""What a validation found, as data: what was compared, what broke, and what explains it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pipeproof.core.cause import Cause, Cells, RuledOut
from pipeproof.core.hints import hints
from pipeproof.core.measured import Measured
from pipeproof.core.mismatch import Mismatch, small
from pipeproof.core.observe.stack import Line
from pipeproof.core.reason import Reason

Tier = Literal["bitwise", "fp32", "TF32", "bf16", "fp16", "fp64", "none"]  # bit for bit, or to the rounding of a dtype
Outcome = Literal["pass", "fail", "unknown", "not seen", "not applicable"]
JUDGED = ("seen", "expected")
_UNJUDGED: Mapping[str, str] = {"pass": "same", "fail": "different", "wrong": "different"}


@dataclass(frozen=True)
class LawResult:
    """A property that must hold, and how it fared.

    checked: how many things were compared. exact: how many of them agreed bit for bit. wrong: how many did not agree.
    left_out: the names of those that should have been compared and were not. reasons: why it is unknown, or not seen.
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
        """All of it on one line; ``outcome`` is the word for how it fared."""
        exact = f"{self.checked} compared, {self.exact} bit for bit" if self.checked else ""
        missed = f"{len(self.left_out)} not compared" if self.left_out else ""
        worst = f"worst {small(self.worst)}" if self.worst else ""
        details = ", ".join(text for text in (exact, missed, worst, self.note) if text)
        return f"{self.name:<18} {outcome:<14} {details}".rstrip()


@dataclass(frozen=True)
class Findings:
    """What was found.

    tier: "bitwise", a dtype's name, or "none" if not everything agreed. cause: what explains it, all of it together. It
    is empty if the evidence does not decide; then ``undecided`` says why. Both are empty if nobody asked. alternatives:
    explanations that the evidence allows as well, each as a whole, the likeliest first. ruled_out: what was compared on
    the way and agreed. cells: the coefficients that causes rest on. bindings: the case's numbers, in words. floor: the
    largest rounding floor over all gradients; 0 if none was measured. failure: how the ranks failed, if there was
    nothing to judge; failed_at: the user's lines in which the first of them did; ranks: a line for each. ended: "error"
    for a crash, "hang" for a hang. headline: a sentence for what the laws cannot say. rerun: what to type if there is
    no replay line. seconds: what it took. stopped: what was raised while things were compared. unsought: what was
    raised while the cause was looked for. traceback: of either. measured: numbers. sides: what found and due are
    called; of two runs, neither of which is known to be right, they are names of these.
    """

    config: str
    verdict: Literal["pass", "fail", "unknown"]
    tier: Tier
    laws: tuple[LawResult, ...]
    mismatches: tuple[Mismatch, ...] = ()
    cause: tuple[Cause, ...] = ()
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
    def judged(self) -> bool:
        """Whether one side is known to be right."""
        return self.sides == JUDGED

    @property
    def word(self) -> str:
        """The outcome as a reader meets it: a crash and a hang are no verdict, but are no mere doubt either."""
        return self.ended or self.outcome(self.verdict)

    def outcome(self, word: str) -> str:
        """``word`` for an outcome; what differs from a run that may be wrong has not failed."""
        return word if self.judged else _UNJUDGED.get(word, word)

    @property
    def next(self) -> list[str]:
        """What to look at, or to do, for its causes; where something is unknown, what makes it known."""
        if self.verdict == "pass" or (self.verdict == "fail" and self.cause):
            return [*hints(self.cause, self.measured)]
        outcomes = {"unknown"} if self.verdict == "unknown" else {"unknown", "not seen"}
        reasons = [reason for law in self.laws if law.outcome in outcomes for reason in law.reasons]
        return [*hints(self.cause, self.measured), *dict.fromkeys(reason.cure for reason in reasons)]

    @property
    def replay(self) -> str:
        """The line that runs this case again."""
        return self.rerun or f'pipeproof replay "{self.config}"'
