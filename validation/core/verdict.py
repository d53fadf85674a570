"""Verdicts as data: comparisons, mismatches, next steps."""

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
from pipeproof.core.observe.stack import Line
from pipeproof.core.text import LISTED, brief, details, headline, sentence
from pipeproof.pipeline.sizes import shorten

SCHEMA = "pipeproof/3"  # version for all JSON output: validation/reports/schema.json
_LONGEST = 300  # characters kept from an error
EXIT_STATUS: Mapping[str, int] = {"pass": 0, "fail": 1, "unknown": 3}


class ValidationFailed(AssertionError):
    """A failed or unknown ``verdict``."""

    __module__ = "pipeproof.errors"  # the users' import path

    def __init__(self, verdict: "Verdict") -> None:
        super().__init__(str(verdict))
        self.verdict = verdict


class PipelineMismatch(ValidationFailed):
    """The pipeline and the reference give different answers."""

    __module__ = "pipeproof.errors"


class NoVerdict(ValidationFailed):
    """Nothing was decided: a crash, a hang, or insufficient evidence."""

    __module__ = "pipeproof.errors"


@dataclass(frozen=True)
class Crash:
    """An unexpected error: one line, and its traceback."""

    said: str
    traceback: str

    @staticmethod
    def of(error: BaseException) -> "Crash":
        return Crash(describe_error(error), "".join(traceback.format_exception(error)))


@dataclass(frozen=True)
class Verdict(Findings):
    """A validation's result, true for a pass. ``Findings`` documents its fields."""

    @property
    def reason(self) -> str:
        """The fault in a few words: causes, or broken laws."""
        causes = " and ".join(cause.short for cause in self.causes[:LISTED])
        if self.outcome == "fail":
            return causes or headline(self)
        return f"{self.word.upper()} {headline(self)}"

    @property
    def summary(self) -> str:
        """The user's line at fault, if known, and the fault."""
        lines = self.own_lines
        outcome = "" if self.outcome == "fail" else f"{self.word.upper()} "
        return ": ".join([*(line.place for line in lines[:1]), f"{outcome}{sentence(self)}"])

    @property
    def own_lines(self) -> list[Line]:
        """The user's lines in which it went wrong, as far as they are known, the likeliest first."""
        return [one.line for cause in self.causes[:1] for one in cause.lines] or [*self.failed_at]

    @property
    def exit_status(self) -> int:
        """0 pass, 1 wrong answer, 3 no verdict."""
        return EXIT_STATUS[self.outcome]

    def __bool__(self) -> bool:
        """True for a pass alone, so that ``assert verdict`` works."""
        return self.outcome == "pass"

    def drop_cause(self, crash: Crash) -> "Verdict":
        """Return this verdict without an explanation, after an error in the search for causes."""
        return replace(self, unsought=crash.said, traceback=crash.traceback)

    def before_its_end(self, crash: Crash | None) -> "Verdict":
        """Return this verdict after an error during comparison: a fail stays, nothing passes.

        None: no error.
        """
        if crash is None:
            return self
        outcome: Literal["fail", "unknown"] = "fail" if self.outcome == "fail" else "unknown"
        return replace(self, outcome=outcome, tier="none", stopped=crash.said, traceback=crash.traceback)

    def raise_if_failed(self) -> None:
        """Raise ``PipelineMismatch`` or ``NoVerdict``, with the whole screen as text, unless this verdict passes."""
        __tracebackhide__ = True  # a test's traceback should show the test's own line
        if self.outcome != "pass":
            raise PipelineMismatch(self) if self.outcome == "fail" else NoVerdict(self)

    def law(self, name: str) -> LawResult:
        """Return the law called ``name``. Raises KeyError if it was not judged."""
        return {law.name: law for law in self.laws}[name]

    def __str__(self) -> str:
        """A few lines for the first reader."""
        return brief(self)

    @property
    def details(self) -> str:
        """The full text: causes, lines, laws, excluded causes."""
        return details(self)

    def as_dict(self) -> dict[str, object]:
        """Return plain data for JSON. A pass omits ``measured``: its laws have the largest errors."""
        data = asdict(replace(self, measured=Measured()))
        data |= {"mismatches": [mismatch.as_dict() for mismatch in self.mismatches]}
        data |= {"measured": self.measured.as_dict(), "versions": dict(versions())}
        if self.outcome == "pass":
            del data["measured"]
        return {"schema": SCHEMA, **data, "next": self.next, "replay": self.replay}

    def to_html(self) -> str:
        """Render the verdict as a page: one HTML file without network access."""
        html: str = import_module(__name__.partition(".")[0]).page(self)  # the front door imports later rooms
        return html


def describe_error(error: BaseException) -> str:
    """Describe an error and its place on one line."""
    said = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{': ' * bool(said)}{shorten(said, _LONGEST)}{where}"


def overall(laws: Sequence[LawResult]) -> Literal["pass", "fail", "unknown"]:
    """Combine law outcomes: fail before unknown before pass. Without any pass, unknown."""
    outcomes = {law.outcome for law in laws}
    if "fail" in outcomes:
        return "fail"
    return "unknown" if "unknown" in outcomes or "pass" not in outcomes else "pass"
