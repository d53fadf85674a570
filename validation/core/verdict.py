"""The verdict as data: what was compared, what broke, and what to type next."""

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Literal

from pipeproof.core.findings import JUDGED as JUDGED
from pipeproof.core.findings import Findings
from pipeproof.core.findings import LawResult as LawResult
from pipeproof.core.findings import Outcome as Outcome
from pipeproof.core.findings import Tier as Tier
from pipeproof.core.measured import Measured, versions
from pipeproof.core.mismatch import Mismatch as Mismatch
from pipeproof.core.mismatch import Size as Size
from pipeproof.core.mismatch import Value as Value
from pipeproof.core.mismatch import What as What
from pipeproof.core.mismatch import small as small
from pipeproof.core.text import CAUSES, brief, details, headline, sentence
from pipeproof.pipeline.sizes import shortened

SCHEMA = "pipeproof/3"  # of all that is written as JSON: validation/reports/schema.json
_LONGEST = 300  # characters of what was raised
EXIT_STATUS: Mapping[str, int] = {"pass": 0, "fail": 1, "unknown": 3}


class ValidationFailed(AssertionError):
    """A verdict that is not a pass; ``verdict`` holds it."""

    __module__ = "pipeproof"  # where users have it from

    def __init__(self, verdict: "Verdict") -> None:
        super().__init__(str(verdict))
        self.verdict = verdict


class PipelineMismatch(ValidationFailed):
    """The pipeline gives another answer than the reference."""

    __module__ = "pipeproof"


class NoVerdict(ValidationFailed):
    """Nothing was decided: a crash, a hang, or evidence that does not suffice."""

    __module__ = "pipeproof"


@dataclass(frozen=True)
class Crash:
    """What was raised where nothing should be: on one line, and with its traceback."""

    said: str
    traceback: str

    @staticmethod
    def of(error: BaseException) -> "Crash":
        return Crash(raised(error), "".join(traceback.format_exception(error)))


@dataclass(frozen=True)
class Verdict(Findings):
    """What a validation found; it is true if that is a pass. ``Findings`` says what its fields are."""

    @property
    def reason(self) -> str:
        """What is wrong, in a few words: the causes, or the laws that are broken."""
        told = " and ".join(cause.short for cause in self.cause[:CAUSES])
        if self.verdict == "fail":
            return told or headline(self)
        return f"{self.word.upper()} {headline(self)}"

    @property
    def summary(self) -> str:
        """The user's line in which it went wrong, as far as it is known, and what is wrong."""
        lines = [one.line for cause in self.cause[:1] for one in cause.lines] or self.failed_at
        outcome = "" if self.verdict == "fail" else f"{self.word.upper()} "
        return ": ".join([*(line.place for line in lines[:1]), f"{outcome}{sentence(self)}"])

    @property
    def exit_status(self) -> int:
        """0 pass, 1 wrong answer, 3 no verdict."""
        return EXIT_STATUS[self.verdict]

    def __bool__(self) -> bool:
        """Whether this is a pass: ``assert verdict`` holds for nothing else."""
        return self.verdict == "pass"

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
        """Raise ``PipelineMismatch`` or ``NoVerdict``, with the whole screen as its text, unless this is a pass."""
        __tracebackhide__ = True  # in a test's traceback the test's own line is what matters
        if self.verdict != "pass":
            raise PipelineMismatch(self) if self.verdict == "fail" else NoVerdict(self)

    def law(self, name: str) -> LawResult:
        """The law called ``name``. Raises KeyError if it was not judged."""
        return {law.name: law for law in self.laws}[name]

    def __str__(self) -> str:
        """What a reader needs first, in a few lines."""
        return brief(self)

    @property
    def details(self) -> str:
        """All of it: causes, lines, laws, and what was ruled out."""
        return details(self)

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON. ``measured`` is left out of a pass: its laws have the largest errors."""
        data = asdict(replace(self, measured=Measured()))
        data |= {"mismatches": [mismatch.as_dict() for mismatch in self.mismatches]}
        data |= {"measured": self.measured.as_dict(), "versions": dict(versions())}
        if self.verdict == "pass":
            del data["measured"]
        return {"schema": SCHEMA, **data, "next": self.next, "replay": self.replay}

    def to_html(self) -> str:
        """The verdict as a page: one file of HTML that needs no network."""
        html: str = import_module(__name__.partition(".")[0]).page(self)  # the front door leads to rooms after this one
        return html


def raised(error: BaseException) -> str:
    """What was raised, and where, on one line."""
    said = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{': ' * bool(said)}{shortened(said, _LONGEST)}{where}"


def overall(laws: Sequence[LawResult]) -> Literal["pass", "fail", "unknown"]:
    """Fail if any law fails; else unknown if any is, or if none was exercised; else pass."""
    outcomes = {law.outcome for law in laws}
    if "fail" in outcomes:
        return "fail"
    return "unknown" if "unknown" in outcomes or "pass" not in outcomes else "pass"
