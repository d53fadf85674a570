"""The verdict as data: what was compared, what broke, and what to type next."""

import math
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from pipeproof.judging.cause import KINDS, Cause, Cells, RuledOut
from pipeproof.judging.measured import Measured, versions

SCHEMA = "pipeproof/verdict/2"
Tier = Literal["bitwise", "fp32", "bf16", "fp64", "none"]  # bit for bit, or to the rounding of a dtype
Outcome = Literal["pass", "fail", "unknown", "not seen", "not applicable"]

_SHOWN = 4  # mismatches on a screen; the rest are counted
_CAUSES = 3  # causes that hold together, on a screen
_ALTERNATIVES = 2
_LONGEST = 300  # characters of what was raised
_LISTED = 12  # names in a note
EXIT_STATUS: Mapping[str, int] = {"pass": 0, "fail": 1, "unknown": 3}


class ValidationFailed(AssertionError):
    """A verdict that is not a pass; ``verdict`` holds it."""

    def __init__(self, verdict: "Verdict") -> None:
        super().__init__(str(verdict))
        self.verdict = verdict


@dataclass(frozen=True)
class Size:
    """A tensor in numbers: its shape and norm, and of one that was seen, how much of it is the expected one.

    ``began``: it is a parameter's movement, from what was of this norm. ``factor`` times the expected one is its part
    along that; None where one of the two is zero, or of another shape.
    """

    shape: tuple[int, ...]
    norm: float | None = None
    began: float | None = None
    factor: float | None = None
    cosine: float | None = None

    def __str__(self) -> str:
        if self.norm is None:
            return f"shape {list(self.shape)}"
        alike = "" if self.factor is None else f", {self.factor:.6g} times expected, cosine {self.cosine:.6f}"
        return f"{'' if self.began is None else 'update of '}norm {self.norm:.6g}{alike}"


# What was compared, which says how its values read. "text": of what has no value but words.
What = Literal[
    "text", "number", "tensor", "gradient", "buffer", "held", "losses", "mode", "forward", "backward", "calls",
    "not-finite",
]  # fmt: skip
Value = str | float | bool | Size | tuple[int | None, ...]

_READS: Mapping[What, Callable[[Any], str]] = {
    "number": lambda value: f"{value:.9g}",
    "gradient": lambda there: "a gradient" if there else "None",
    "buffer": lambda there: "a buffer" if there else "no such buffer",
    "held": lambda count: f"held {count} times",
    "losses": lambda count: f"{count} losses",
    "mode": lambda training: f"{'training' if training else 'evaluation'} mode",
    "forward": lambda order: f"forward of {_order(order)}",
    "backward": lambda order: f"backward of {_order(order)}",
    "calls": lambda order: f"its module ran for {_order(order)}",
    "not-finite": lambda value: f"loss {value:.9g}",
}
_DUE: Mapping[What, Callable[[Any], str]] = {
    "forward": lambda every: f"forward of each of {_order(every)} once",
    "backward": lambda every: f"backward of each of {_order(every)} once",
    "calls": lambda every: f"once for each of {_order(every)}",
}


@dataclass(frozen=True, eq=False)
class Mismatch:
    """One thing that differs: where, what was found, what was due, and by how much it may differ.

    ``operation`` counts from 1 over the plan. ``what`` was compared says what ``found`` and ``due`` are: numbers, sizes
    of tensors, whether something is there, how often, which microbatches in which order (None: nobody knows). ``told``
    is what was found in words, where its value alone does not say it. Fields that do not apply are None.
    """

    law: str
    operation: int
    found: Value = ""
    due: Value = ""
    what: What = "text"
    rank: int | None = None
    stage: int | None = None
    microbatch: int | None = None
    action: str | None = None
    parameter: str | None = None
    error: float | None = None
    limit: float | None = None
    told: str = ""

    @property
    def seen(self) -> str:
        """What was found, in words."""
        return self.told or _READS.get(self.what, str)(self.found)

    @property
    def expected(self) -> str:
        """What was due, in words."""
        return _DUE.get(self.what, _READS.get(self.what, str))(self.due)

    @property
    def ratio(self) -> float | None:
        """How many times the due number the found one is; None where they are no such numbers."""
        if self.what != "number" or not isinstance(self.found, float) or not isinstance(self.due, float):
            return None
        return self.found / self.due if self.due and math.isfinite(self.found) else None

    @property
    def where(self) -> str:
        """Rank, stage, microbatch, action and parameter, as far as they are known."""
        return ", ".join(f"{name} {value}" for name, value in self._place if value is not None) or "every rank"

    @property
    def allowance(self) -> str:
        """How large the error is, and how large it might be; empty where that was no question of size."""
        if self.error is None or self.limit is None:
            return ""
        return f"; relative error {small(self.error)}, rounding allows {small(self.limit)}"

    @property
    def _place(self) -> tuple[tuple[str, object], ...]:
        return (
            ("rank", self.rank),
            ("stage", self.stage),
            ("microbatch", self.microbatch),
            ("action", self.action),
            ("parameter", self.parameter),
        )

    def __str__(self) -> str:
        return f"{self.law}: {self.where}: {self.seen} (expected {self.expected})"

    def __eq__(self, other: object) -> bool:
        """As they read: a NaN is no other than another."""
        return isinstance(other, Mismatch) and self._reads == other._reads

    def __hash__(self) -> int:
        return hash(self._reads)

    @property
    def _reads(self) -> tuple[object, ...]:
        return self.law, self.operation, self._place, self.seen, self.expected, self.error, self.limit

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON: the values, and how they read."""
        return {**asdict(self), "seen": self.seen, "expected": self.expected}


def _order(microbatches: Sequence[int | None]) -> str:
    return f"[{', '.join('?' if one is None else str(one) for one in microbatches)}]"


@dataclass(frozen=True)
class LawResult:
    """A property that must hold, and how it fared.

    ``checked`` things were compared, ``exact`` of them agreed bit for bit, ``wrong`` of them did not agree;
    ``left_out`` are the names of those that should have been compared and were not.
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

    def __str__(self) -> str:
        exact = f"{self.checked} compared, {self.exact} bit for bit" if self.checked else ""
        missed = f"{len(self.left_out)} not compared" if self.left_out else ""
        worst = f"worst {small(self.worst)}" if self.worst else ""
        details = ", ".join(text for text in (exact, missed, worst, self.note) if text)
        return f"{self.name:<18} {self.outcome:<14} {details}".rstrip()


@dataclass(frozen=True)
class Crash:
    """What was raised where nothing should be: on one line, and with its traceback."""

    said: str
    traceback: str

    @staticmethod
    def of(error: BaseException) -> "Crash":
        return Crash(raised(error), "".join(traceback.format_exception(error)))


@dataclass(frozen=True)
class Verdict:
    """What a validation found. ``tier`` is "bitwise", a dtype's name, or "none" where not everything agreed.

    ``cause`` is what explains it, all of it together: none where the evidence does not decide, and ``undecided`` then
    says why; both are empty where nobody asked. ``alternatives`` are explanations that the evidence allows as well,
    each as a whole, the likeliest first. ``ruled_out`` is what was compared on the way and agreed; ``cells`` are the
    coefficients that causes rest on. ``bindings`` are the case's numbers, in words.
    ``floor`` is the largest rounding floor measured over all gradients, 0 where none was measured; ``failure`` is how
    the ranks failed where there was nothing to judge; ``headline`` says in a sentence what the laws cannot; ``rerun``
    is what to type where there is no replay line; ``seconds`` is what it took. ``stopped``: what was raised while
    things were compared, ``unsought``: while the cause was looked for; ``traceback`` has all. ``measured``: numbers.
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
    stopped: str = ""
    unsought: str = ""
    traceback: str = field(default="", compare=False)
    measured: Measured = field(default=Measured(), compare=False, repr=False)

    @property
    def replay(self) -> str:
        """The line that runs this case again."""
        return self.rerun or f'pipeproof replay "{self.config}"'

    @property
    def exit_status(self) -> int:
        """0 pass, 1 wrong answer, 3 no verdict."""
        return EXIT_STATUS[self.verdict]

    def without_cause(self, crash: Crash) -> "Verdict":
        """This verdict, with what was raised where its cause was looked for: it stands without an explanation."""
        return replace(self, unsought=crash.said, traceback=crash.traceback)

    def before_its_end(self, crash: Crash | None) -> "Verdict":
        """This verdict, with what was raised before all was compared: what is wrong is wrong, and nothing passes.

        None: nothing was raised.
        """
        if crash is None:
            return self
        outcome: Literal["fail", "unknown"] = "fail" if self.verdict == "fail" else "unknown"
        return replace(self, verdict=outcome, tier="none", stopped=crash.said, traceback=crash.traceback)

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
        if self.stopped:
            rows += _labelled("stopped", [f"before all was compared: {self.stopped}"])
        if self.unsought:
            rows += _labelled("cause", [f"not sought: looking for it raised {self.unsought}"])
        elif not self.cause and self.undecided:
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
            rows += _not_seen(self.laws)
        return _labelled("laws", rows)

    def _headline(self) -> str:
        if self.headline:
            return self.headline
        if self.failure:
            return "the ranks failed before there was anything to judge"
        if self.verdict == "pass":
            return f"{sum(law.checked for law in self.laws)} comparisons, {self.tier}"
        if self.verdict == "unknown" and self.stopped:
            return f"not all was compared: {self.stopped}"
        broken = [law for law in self.laws if law.outcome == self.verdict]
        if self.verdict == "fail":
            return ", ".join(f"{law.name} ({law.wrong} of {law.checked})" for law in broken)
        return "; ".join(f"{law.name}: {law.note}" if law.note else law.name for law in broken)

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        data = asdict(replace(self, measured=Measured()))
        data |= {"mismatches": [mismatch.as_dict() for mismatch in self.mismatches]}
        data |= {"measured": self.measured.as_dict(), "versions": dict(versions())}
        return {"schema": SCHEMA, **data, "replay": self.replay}

    def to_html(self) -> str:
        """The verdict as a page: one file of HTML that needs no network."""
        html: str = import_module(__name__.partition(".")[0]).page(self)  # the front door leads to rooms after this one
        return html


def _not_seen(laws: Sequence[LawResult]) -> list[str]:
    """The laws of which nothing was seen, those with one reason on one line."""
    reasons: dict[str, list[str]] = {}
    for law in laws:
        if law.outcome == "not seen":
            reasons.setdefault(law.note, []).append(law.name)
    return [f"{'not seen':<18} {', '.join(names)}: {reason}" for reason, names in reasons.items()]


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


def raised(error: BaseException) -> str:
    """What was raised, and where, on one line."""
    said = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{': ' * bool(said)}{_shortened(said)}{where}"


def _shortened(text: str) -> str:
    """``text``, cut where it is too long for a line."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def overall(laws: Sequence[LawResult]) -> Literal["pass", "fail", "unknown"]:
    """Fail if any law fails; else unknown if any is, or if none was exercised; else pass."""
    outcomes = {law.outcome for law in laws}
    if "fail" in outcomes:
        return "fail"
    return "unknown" if "unknown" in outcomes or "pass" not in outcomes else "pass"


def small(value: float) -> str:
    """A relative error in two digits; 0 only for exactly nothing."""
    return "0" if value == 0 else f"{value:.1e}"


def names_of(names: Sequence[str]) -> str:
    """The first of ``names``, and how many more there are."""
    return ", ".join(names[:_LISTED]) + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
