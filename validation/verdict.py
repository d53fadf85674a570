"""The verdict as data: what was compared, what broke, and what to type next."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

SCHEMA = "pipeproof/verdict/1"
Outcome = Literal["pass", "fail", "unknown", "not applicable"]

EXIT_STATUS: Mapping[str, int] = {"pass": 0, "fail": 1, "unknown": 3}


class ValidationFailed(AssertionError):
    """A verdict that is not a pass; ``verdict`` holds it."""

    def __init__(self, verdict: "Verdict", text: str) -> None:
        super().__init__(text)
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


@dataclass(frozen=True)
class Law:
    """A property that must hold, and how it fared: ``checked`` things were compared, ``exact`` of them bit for bit."""

    name: str
    outcome: Outcome
    checked: int = 0
    exact: int = 0
    worst: float = 0.0
    floor: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """What a validation found. ``tier`` is "bitwise", "fp32", or "none" where not everything agreed.

    ``floor`` is the largest rounding floor measured over all gradients, 0 where none was measured; ``seconds`` what
    judging took.
    """

    config: str
    verdict: Literal["pass", "fail", "unknown"]
    tier: Literal["bitwise", "fp32", "none"]
    laws: tuple[Law, ...]
    mismatches: tuple[Mismatch, ...] = ()
    cause: str | None = None
    floor: float = 0.0
    seconds: float = field(default=0.0, compare=False)

    @property
    def replay(self) -> str:
        """The line that runs this case again."""
        return f'pipeproof replay "{self.config}"'

    @property
    def exit_status(self) -> int:
        """0 pass, 1 wrong answer, 3 no verdict."""
        return EXIT_STATUS[self.verdict]

    def law(self, name: str) -> Law:
        """The law called ``name``. Raises KeyError if it was not judged."""
        return {law.name: law for law in self.laws}[name]

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        data = asdict(self)
        return {"schema": SCHEMA, **data, "replay": self.replay}


def overall(laws: Sequence[Law]) -> Literal["pass", "fail", "unknown"]:
    """Fail if any law fails; else unknown if any is, or if none was exercised; else pass."""
    outcomes = {law.outcome for law in laws}
    if "fail" in outcomes:
        return "fail"
    return "unknown" if "unknown" in outcomes or "pass" not in outcomes else "pass"
