"""The verdict as data: what was compared, what broke, and what to type next."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from validation.judging.cause import KINDS, Cause, Cells, RuledOut

SCHEMA = "pipeproof/verdict/1"
Tier = Literal["bitwise", "fp32", "bf16", "fp64", "none"]  # bit for bit, or to the rounding of a dtype
Outcome = Literal["pass", "fail", "unknown", "not applicable"]

_SHOWN = 4  # mismatches on a screen; the rest are counted
_CAUSES = 3  # causes that hold together, on a screen
_ALTERNATIVES = 2
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
    """What a validation found. ``tier`` is "bitwise", a dtype's name, or "none" where not everything agreed.

    ``cause`` is what explains it, all of it together: none where the evidence does not decide, and ``undecided`` then
    says why; both are empty where nobody asked. ``alternatives`` are explanations that the evidence allows as well,
    each as a whole, the likeliest first. ``ruled_out`` is what was compared on the way and agreed; ``cells`` are the
    coefficients that causes rest on. ``bindings`` are the case's numbers, in words.
    ``floor`` is the largest rounding floor measured over all gradients, 0 where none was measured; ``failure`` is how
    the ranks failed where there was nothing to judge; ``headline`` says in a sentence what the laws cannot; ``rerun``
    is what to type where there is no replay line; ``seconds`` is what it took.
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
    headline: str = ""
    rerun: str = ""
    seconds: float = field(default=0.0, compare=False)

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
        __tracebackhide__ = True  # in a test's traceback the test's own line is what matters
        if self.verdict != "pass":
            raise ValidationFailed(self)

    def law(self, name: str) -> LawResult:
        """The law called ``name``. Raises KeyError if it was not judged."""
        return {law.name: law for law in self.laws}[name]

    def __str__(self) -> str:
        """All that a reader needs, on one screen: the cause, where, seen, expected, the bindings, what to type next."""
        rows = [f"{self.verdict.upper()} {self._headline()}", *self._causes()]
        if self.failure:
            rows.append(self.failure)
        if self.mismatches:
            first = self.mismatches[0]
            rows += [
                f"  where     {first.where}; operation {first.operation} of the plan",
                f"  seen      {first.seen}",
                f"  expected  {first.expected}{first.allowance}",
            ]
        rows.append(f"  bindings  {self.bindings}" if self.bindings else f"  case      {self.config}")
        rows += [f"  then      {mismatch}" for mismatch in self.mismatches[1:_SHOWN]]
        if len(self.mismatches) > _SHOWN:
            rows.append(f"  then      and {len(self.mismatches) - _SHOWN} more")
        return "\n".join([*rows, *self._laws(), f"  replay    {self.replay}"])

    def _causes(self) -> list[str]:
        rows = _conjunction("cause", self.cause)
        for causes in self.alternatives[:_ALTERNATIVES]:
            rows += _conjunction("or", causes)
        if len(self.alternatives) > _ALTERNATIVES:
            rows += _labelled("or", [f"{len(self.alternatives) - _ALTERNATIVES} more explanations"])
        if not self.cause and self.undecided:
            rows.append("  cause     unknown: the evidence does not decide")
        rows += _labelled("found", self.cells.lines() if self.cells is not None else [])
        return [*rows, *_labelled("open", self.undecided), *_labelled("not", map(str, self.ruled_out))]

    def _laws(self) -> list[str]:
        """The laws that matter; those that passed in one line, where any did not."""
        if self.verdict == "pass":
            shown, passed = list(self.laws), []
        else:
            shown = [law for law in self.laws if law.outcome in ("fail", "unknown")]
            passed = [law for law in self.laws if law.outcome == "pass"]
        rows = [str(law) for law in shown]
        if passed:
            compared = sum(law.checked for law in passed)
            rows.append(f"{'pass':<18} {', '.join(law.name for law in passed)}: {compared} compared")
        return _labelled("laws", rows)

    def _headline(self) -> str:
        if self.headline:
            return self.headline
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


def _conjunction(label: str, causes: Sequence[Cause]) -> list[str]:
    """Causes that hold together; those that the screen has no room for are counted."""
    rows = []
    for cause in causes[:_CAUSES]:
        rows += _labelled(label, [f"{cause.kind}: {KINDS[cause.kind]}", str(cause)])
        label = "and"
    left = len(causes) - _CAUSES
    return rows + (_labelled("and", [f"{left} more"]) if left > 0 else [])


def _labelled(label: str, lines: Iterable[str]) -> list[str]:
    """``lines`` of the screen, with ``label`` at the first."""
    return [f"  {'' if k else label:<9} {line}" for k, line in enumerate(lines)]


def overall(laws: Sequence[LawResult]) -> Literal["pass", "fail", "unknown"]:
    """Fail if any law fails; else unknown if any is, or if none was exercised; else pass."""
    outcomes = {law.outcome for law in laws}
    if "fail" in outcomes:
        return "fail"
    return "unknown" if "unknown" in outcomes or "pass" not in outcomes else "pass"


def small(value: float) -> str:
    """A relative error in two digits; 0 only for exactly nothing."""
    return "0" if value == 0 else f"{value:.1e}"
