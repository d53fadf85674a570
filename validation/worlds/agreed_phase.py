"""One phase of a test (setup, call or teardown) as several ranks saw it, made into one report that all ranks share."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import pytest
from _pytest._code.code import ReprFileLocation, TerminalRepr
from _pytest._io import TerminalWriter

from validation.worlds.rank_report import Ending, RankReport, culprit_of, describe

_STRICT = "[XPASS(strict)]"  # how pytest's report begins where a test should have failed
_ENDINGS = {"passed": Ending.FINISHED, "failed": Ending.RAISED, "skipped": Ending.SKIPPED}


@dataclass(frozen=True)
class Phase:
    """What one rank's pytest made of a phase.

    ``outcome`` is pytest's passed, failed or skipped; ``message`` the exception or the reason; ``expected`` the reason
    to expect a failure, where there is one; ``sections`` what was captured; ``at_s`` the wall clock.
    """

    outcome: str
    message: str
    text: str
    expected: str | None
    sections: tuple[tuple[str, str], ...]
    at_s: float

    @classmethod
    def of(cls, report: pytest.TestReport) -> Self:
        """The phase that this report is about, as this rank saw it."""
        text, crash = report.longreprtext, getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash is not None else text
        if message.startswith("assert "):  # pytest leaves out what it was that the assertion raised
            message = f"AssertionError: {message}"
        if isinstance(report.longrepr, tuple):
            message = report.longrepr[2].removeprefix("Skipped: ")
        expected = getattr(report, "wasxfail", None)
        if not report.failed:  # then nobody will want the rest
            return cls(report.outcome, message, "", expected, (), time.time())
        return cls(report.outcome, message, text, expected, tuple(report.sections), time.time())

    def seen_by(self, rank: int) -> RankReport:
        """The phase as the report of a rank. To fail as expected is to finish."""
        ending = _ENDINGS[self.outcome] if self.expected is None else Ending.FINISHED
        return RankReport(rank, ending, self.message, self.text, at_s=self.at_s)

    @property
    def as_expected(self) -> bool:
        """Whether this outcome goes with a failure that is expected, and that another rank may have had."""
        return self.outcome == "passed" or self.expected is not None or self.message.startswith(_STRICT)


def settle(report: pytest.TestReport, phases: Sequence[Phase], *, rank: int) -> None:
    """Make this rank's report say what the ranks saw together; the phases are in rank order.

    Where all agree it stays as it is. Where some failed, or skipped alone, the phase has failed on every rank, with the
    culprit's text first. A failure that is expected may show on some ranks only.
    """
    outcomes = {phase.outcome for phase in phases}
    messages = {phase.message for phase in phases}
    if outcomes in ({"passed"}, {"skipped"}) or (outcomes == {"failed"} and len(messages) == 1):
        return
    expected = [phase.expected for phase in phases if phase.outcome == "skipped" and phase.expected is not None]
    if expected and all(phase.as_expected for phase in phases):
        report.outcome = "skipped"
        report.wasxfail = expected[0]
        return
    reports = [phase.seen_by(each) for each, phase in enumerate(phases)]
    sections = phases[culprit_of(reports)].sections
    blame(report, reports, rank=rank, sections=sections)


def blame(
    report: pytest.TestReport,
    reports: Sequence[RankReport],
    *,
    rank: int,
    sections: Sequence[tuple[str, str]] = (),
) -> None:
    """Make the report a failure that puts the culprit first; ``sections`` is what the culprit's pytest captured.

    The culprit's own report keeps its text, which pytest can show better than anybody it was sent to.
    """
    culprit = culprit_of(reports)
    if culprit == rank and report.failed:
        lines = [other.line() for other in reports if other.rank != rank]
        report.sections.append(("the other ranks", "\n".join(lines)))
        return
    report.outcome = "failed"
    vars(report).pop("wasxfail", None)
    report.longrepr = _Story(describe(reports), report.location)
    report.sections.extend((f"rank {culprit}: {title}", text) for title, text in sections)


class _Story(TerminalRepr):
    """Text in the place of a traceback, with the first line for pytest's short summary."""

    def __init__(self, text: str, location: tuple[str, int | None, str]) -> None:
        self.text = text
        path, line, _ = location
        self.reprcrash = ReprFileLocation(path, (line or 0) + 1, text.partition("\n")[0])

    def toterminal(self, tw: TerminalWriter) -> None:
        """Write the text, each line as it is."""
        for line in self.text.splitlines():
            tw.line(line)
