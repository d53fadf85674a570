"""Cases with their verdicts, a gate's exit status, and its reports: JUnit, Markdown, GitHub annotations."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pipeproof.core.text import sentence
from pipeproof.core.verdict import Verdict
from pipeproof.pipeline.sizes import SHOWN, some
from pipeproof.reports.columns import ROWS
from pipeproof.reports.table import outcome
from pipeproof.reports.template import render

Group = Literal["step", "table", "pinned", "fuzz", "planted"]
_ORDER = {"fail": 0, "unknown": 1, "pass": 2}


@dataclass(frozen=True)
class CaseResult:
    """A case of a campaign or a gate.

    ``group``: of a gate, a user's step, from the table of schedules, pinned by its line, drawn, or planted. ``title``
    names it for a reader, and ``kind`` is its schedule or its step. ``size``: smaller failures come first. ``fault``:
    the planted fault.
    """

    verdict: Verdict
    group: Group | Literal["", "as small as shrinking made it"] = ""
    title: str = ""
    kind: str = ""
    size: tuple[int, ...] = ()
    fault: str = ""

    @property
    def outcome(self) -> Literal["pass", "fail", "unknown"]:
        """The case's outcome: a caught planted fault is a pass, a missed one proves nothing."""
        if self.group == "planted":
            return "pass" if self.verdict.outcome == "fail" else "unknown"
        return self.verdict.outcome

    @property
    def word(self) -> str:
        """The outcome for readers: a hang or an error says more than a doubt."""
        return self.verdict.word if self.outcome == self.verdict.outcome else self.outcome

    @property
    def headline(self) -> str:
        """The outcome on one line."""
        if self.group == "planted":
            where = f" in {self.kind}" if self.size == () else ""
            caught = "is caught" if self.outcome == "pass" else f"is not caught: {self.verdict.outcome}"
            return f"the planted fault {self.fault}{where} {caught}"
        return f"{self.verdict.word.upper()} {sentence(self.verdict)}"

    @property
    def note(self) -> str:
        """What a page says of it beside the verdict."""
        return self.headline if self.group == "planted" else self.group

    @property
    def closeness(self) -> float | None:
        """The largest error in floors of its law; None if all agree bit for bit."""
        found = [law.worst / law.floor for law in self.verdict.laws if law.worst and law.floor]
        return max(found, default=None)

    @property
    def story(self) -> str:
        """The text that a reader needs first; a caught planted fault needs no more."""
        return self.headline if self.group == "planted" and self.outcome == "pass" else str(self.verdict)


@dataclass(frozen=True)
class GateResult:
    """A gate's results. ``case_count``: the number of cases requested; ``missing``: why some did not run."""

    cases: Sequence[CaseResult]
    case_count: int
    seed: int
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def short(self) -> str:
        """Say that fewer cases ran than requested; empty if all did."""
        if len(self.cases) >= self.case_count and not self.missing:
            return ""
        reasons = "".join(f"; {name}: {reason}" for name, reason in self.missing.items())
        return f"{len(self.cases)} of {some(self.case_count, 'case')} ran{reasons}"

    @property
    def status(self) -> int:
        """The exit status: 1 if anything is wrong; 3 if anything is unknown or did not run; else 0."""
        if any(one.outcome == "fail" for one in self.cases):
            return 1
        return 3 if self.short or any(one.outcome != "pass" for one in self.cases) else 0

    @property
    def not_passed(self) -> list[CaseResult]:
        """Cases without a pass, failures first, and the smallest first."""
        found = [one for one in self.cases if one.outcome != "pass"]
        return sorted(found, key=lambda one: (_ORDER[one.outcome], one.size))

    def __str__(self) -> str:
        counts = Counter(one.word for one in self.cases)
        words = ("fail", "hang", "error", "unknown", "pass")
        said = ", ".join(f"{counts[word]} {word}" for word in words if counts[word] or word == "pass")
        word = {0: "PASS", 1: "FAIL", 3: "UNKNOWN"}[self.status]
        return f"gate {word}: {said} of {some(self.case_count, 'case')}; seed {self.seed}" + (
            f"; {self.short}" if self.short else ""
        )


_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(result: GateResult) -> bytes:
    """Render one test case per case, and one for completeness; characters outside XML become question marks."""
    counts = Counter(one.outcome for one in result.cases)
    return _NO_XML.sub("?", render("junit.xml", result=result, counts=counts)).encode()


def annotations(result: GateResult) -> list[str]:
    """Render GitHub commands: a few errors, failures first, and a count of the rest."""
    found = result.not_passed
    lines = [_error(f"pipeproof: {one.title}", one.story, one.verdict) for one in found[:SHOWN]]
    if len(found) > SHOWN:
        lines.append(_error("pipeproof", f"{len(found) - SHOWN} more cases are no pass: see the job summary"))
    if result.short:
        lines.append(_error("pipeproof: the gate is short", result.short))
    return lines


def markdown(result: GateResult, *, page: str = "") -> str:
    """Render verdicts as a table, failures first, and the screens of the first failures; ``page`` is their page."""
    cases = [*result.not_passed, *(one for one in result.cases if one.outcome == "pass")]
    screens = [one.story for one in result.not_passed[:SHOWN]]
    return render(
        "summary.md", result=result, rows=cases[:ROWS], rest=cases[ROWS:], screens=screens, numbers=outcome, page=page
    )


def annotation(verdict: Verdict, *, title: str) -> str:
    """GitHub's command for one verdict that is no pass, at the user's line where that is known."""
    return _error(title, str(verdict), verdict)


def _error(title: str, text: str, verdict: Verdict | None = None) -> str:
    lines = () if verdict is None else verdict.own_lines
    place = "".join(f"file={_escape(one.path, ',:')},line={one.number}," for one in lines[:1])
    return f"::error {place}title={_escape(title, ',:')}::{_escape(text)}"


def _escape(text: str, more: str = "") -> str:
    return text.translate({ord(special): f"%{ord(special):02X}" for special in f"%\r\n{more}"})
