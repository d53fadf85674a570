"""What verdicts leave behind in a session of pytest: pages, properties of its JUnit report, annotations on GitHub.

Nothing of a verdict is imported before there is one: a session without ranks does not wait for torch.
"""

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pipeproof.core.verdict import Verdict


def properties(verdicts: Sequence["Verdict"]) -> list[tuple[str, object]]:
    """What a JUnit report says of each verdict of a test: how it ended, how exact it is, and the worst error."""
    found: list[tuple[str, object]] = []
    for number, verdict in enumerate(verdicts, start=1):
        prefix = "pipeproof" if number == 1 else f"pipeproof.{number}"
        found += [
            (f"{prefix}.outcome", verdict.word),
            (f"{prefix}.tier", verdict.tier),
            (f"{prefix}.worst", verdict.worst),
        ]
    return found


@dataclass(eq=False)  # pytest hashes its plugins
class VerdictReports:
    """Writes a page into ``folder`` for each verdict that failed a test, and says so in the end.

    Workers of pytest-xdist write their own; what they wrote comes with their reports. Under torchrun rank 0 writes.
    """

    folder: Path | None
    pages: list[str] = field(default_factory=list)
    annotations: list[str] = field(default_factory=list)

    def of_test(self, nodeid: str, failing: Sequence["Verdict"]) -> dict[str, list[str]]:
        """Write the pages of a test; return the names and annotations for its report."""
        from pipeproof.reports.gate_reports import annotation
        from pipeproof.worlds.output_file import OutputError, OutputFile

        pages = []
        for number, verdict in enumerate(failing if self.folder is not None else (), start=1):
            assert self.folder is not None, "it is wanted"
            path = self.folder / page_name(nodeid, number)
            try:
                with OutputFile(str(path)) as file:
                    file.write(verdict.to_html().encode(errors="backslashreplace"))
                pages.append(str(path))
            except OutputError as error:  # the verdict stands without its page
                pages.append(str(error))
        return {"pages": pages, "annotations": [annotation(one, title=f"pipeproof: {nodeid}") for one in failing]}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Collect what tests left."""
        left: dict[str, Any] = getattr(report, "pipeproof", {})
        self.pages += left.get("pages", [])
        self.annotations += left.get("annotations", [])

    def pytest_terminal_summary(self, terminalreporter: "pytest.TerminalReporter") -> None:
        """Name the pages; on GitHub, annotate lines of code."""
        for page in self.pages:
            terminalreporter.write_line(f"pipeproof: {page}")
        if os.environ.get("GITHUB_ACTIONS") == "true":
            for line in self.annotations[:10]:  # GitHub shows no more of a step
                terminalreporter.write_line(line)


def page_name(nodeid: str, number: int) -> str:
    """The file of the page of a test's verdict: a name that every file system takes, and that no other test has."""
    plain = re.sub(r"[^\w.-]+", "-", nodeid)[-120:].strip("-")
    digest = hashlib.sha256(nodeid.encode(errors="backslashreplace")).hexdigest()[:6]
    return f"{plain}-{digest}{'' if number == 1 else f'-{number}'}.html"


def make_folder(text: str | None) -> Path | None:
    """The folder of pages, made now: one that cannot be made costs nothing. Raises ``pytest.UsageError``."""
    if text is None:
        return None
    try:
        Path(text).mkdir(parents=True, exist_ok=True)
        if not os.access(text, os.W_OK):
            raise PermissionError(0, "no permission to write there")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise pytest.UsageError(f"--pipeproof-html {text}: {why}; name a folder that can be made and written") from None
    return Path(text).resolve()
