"""pytest under torchrun: ranks agree on tests and outcomes, and rank 0 reports."""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import indent
from types import FrameType
from typing import Self

import pytest
from _pytest._code.code import ReprFileLocation, TerminalRepr
from _pytest._io import TerminalWriter

from pipeproof.worlds.rank_report import Ending, RankReport, culprit_of, describe, of_absent
from pipeproof.worlds.side_store import RanksAbsent, SideStore, side_store
from pipeproof.worlds.timeout import ANSWER_S, END_S, GRACE_S, LAUNCHER_S

_STRICT = "[XPASS(strict)]"  # pytest's prefix for an unexpected pass
_ENDINGS = {"passed": Ending.FINISHED, "failed": Ending.RAISED, "skipped": Ending.SKIPPED}


@dataclass(frozen=True)
class Phase:
    """A phase's outcome on one rank.

    outcome: pytest's passed, failed or skipped. message: exception or reason. expected: reason for an expected failure,
    if any. sections: captured output. at_s: wall clock.
    """

    outcome: str
    message: str
    text: str
    expected: str | None
    sections: tuple[tuple[str, str], ...]
    at_s: float

    @classmethod
    def of(cls, report: pytest.TestReport) -> Self:
        """Convert this rank's report."""
        text, crash = report.longreprtext, getattr(report.longrepr, "reprcrash", None)
        message = crash.message if crash is not None else text
        if message.startswith("assert "):  # pytest omits the assertion's type
            message = f"AssertionError: {message}"
        if isinstance(report.longrepr, tuple):
            message = report.longrepr[2].removeprefix("Skipped: ")
        expected = getattr(report, "wasxfail", None)
        if not report.failed:  # the rest is needed for failures alone
            return cls(report.outcome, message, "", expected, (), time.time())
        return cls(report.outcome, message, text, expected, tuple(report.sections), time.time())

    def report_of(self, rank: int) -> RankReport:
        """Convert to a rank report. An expected failure counts as finished."""
        ending = _ENDINGS[self.outcome] if self.expected is None else Ending.FINISHED
        return RankReport(rank, ending, self.message, self.text, at_s=self.at_s)

    @property
    def as_expected(self) -> bool:
        """True if compatible with an expected failure on another rank."""
        return self.outcome == "passed" or self.expected is not None or self.message.startswith(_STRICT)


def settle(report: pytest.TestReport, phases: Sequence[Phase], *, rank: int) -> None:
    """Merge all ranks' phases, in rank order, into this rank's report.

    Agreement changes nothing. If some failed, or skipped alone, the phase fails on all ranks, culprit first. An
    expected failure may show on some ranks only.
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
    reports = [phase.report_of(each) for each, phase in enumerate(phases)]
    sections = phases[culprit_of(reports)].sections
    blame(report, reports, rank=rank, sections=sections)


def blame(
    report: pytest.TestReport,
    reports: Sequence[RankReport],
    *,
    rank: int,
    sections: Sequence[tuple[str, str]] = (),
) -> None:
    """Turn the report into a failure with the culprit first; ``sections``: the culprit's captured output.

    The culprit's own report keeps its text, which pytest displays best there.
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
    """Text in place of a traceback; its first line serves pytest's summary."""

    def __init__(self, text: str, location: tuple[str, int | None, str]) -> None:
        self.text = text
        path, line, _ = location
        self.reprcrash = ReprFileLocation(path, (line or 0) + 1, text.partition("\n")[0])

    def toterminal(self, tw: TerminalWriter) -> None:
        """Write the text line by line."""
        for line in self.text.splitlines():
            tw.line(line)


STUCK_STATUS = 3


class Watch:
    """Watches one rank, from its own thread, for the moment when others give it up."""

    def __init__(self, side: SideStore) -> None:
        self._side = side
        self._stopped = threading.Event()
        self._watched = threading.get_ident()
        self._thread = threading.Thread(target=self._run, daemon=True, name="pipeproof watch")
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, within a bound."""
        self._stopped.set()
        self._thread.join(ANSWER_S)

    def _run(self) -> None:
        rank = self._side.rank
        while not self._stopped.wait(GRACE_S):
            if self._side.has(f"stack wanted/{rank}"):
                frames = traceback.extract_stack(sys._current_frames()[self._watched])
                pytests = [k for k, one in enumerate(frames) if "_pytest" in one.filename or "pluggy" in one.filename]
                own = frames[pytests[-1] + 1 :] if pytests else []
                self._side.put(f"stack/{rank}", "".join(traceback.format_list(own or frames)).encode())
                self._side.wait_for("over", LAUNCHER_S)
                os._exit(STUCK_STATUS)  # the watched thread may be stuck beyond any other end


def stacks(side: SideStore, ranks: Collection[int]) -> dict[int, str]:
    """Return these ranks' stacks, within a bound. From then on they exit at the session's end."""
    if side.hurried:  # they are gone, and time is short
        return {}
    for rank in ranks:
        side.put(f"stack wanted/{rank}", b"")
    deadline_s = time.monotonic() + END_S
    found = {}
    for rank in ranks:
        side.wait_for(f"stack/{rank}", deadline_s - time.monotonic())
        found[rank] = (side.get(f"stack/{rank}") or b"in native code, or gone").decode()
    return found


@dataclass(frozen=True)
class Collected:
    """One rank's tests in order, its collection errors, and pytest-randomly's seed."""

    nodeids: Sequence[str]
    errors: Mapping[str, str]
    random_seed: int | None = None


def difference(collected: Sequence[Collected]) -> str:
    """Describe differences between ranks' tests, in any order; empty if equal."""
    everything = dict.fromkeys(nodeid for its in collected for nodeid in its.nodeids)
    lines = []
    for rank, its in enumerate(collected):
        if lacks := [nodeid for nodeid in everything if nodeid not in its.nodeids]:
            from pipeproof.pipeline.sizes import first_few  # imports numpy

            lines.append(f"rank {rank} lacks {first_few(lacks)}")
        for path, text in its.errors.items():
            if any(path not in other.errors for other in collected):
                lines.append(f"rank {rank} cannot collect {path}:\n{indent(text, '    ')}")
    return "\n".join(["the ranks collected different tests", *lines]) if lines else ""


_REPORT_FILES = ("xmlpath", "htmlpath", "report_log", "log_file")  # options with a single writer, or the last one wins


class RanksTogether:
    """One rank's plugin. All ranks pass through the same phases and know all outcomes."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._bound_s: float = config.getoption("--pipeproof-rank-timeout")
        self._side = side_store()
        self._rank = self._side.rank
        self._reporter = 0  # the reporting rank
        self._lost = ""  # why ranks can no longer agree
        self._internal_error = ""
        self._errors: dict[str, str] = {}
        self._in_call = False
        self._parts_agree = True
        self._left = False
        self._watch = Watch(self._side)
        if self._rank != 0:
            for option in _REPORT_FILES:
                setattr(config.option, option, None)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionstart(self) -> Generator[None]:
        """Silence ranks above 0, derandomize hypothesis, and shield rank 0 from torchrun's end."""
        from hypothesis import settings

        # Equal examples on all ranks; the active profile keeps other settings.
        settings.register_profile("torchrun", parent=settings(), derandomize=True, database=None, deadline=None)
        settings.load_profile("torchrun")
        if self._rank == 0:
            signal.signal(signal.SIGTERM, self._end_early)
        else:
            self._config.get_terminal_writer()._file = open(os.devnull, "w")
            cache = getattr(self._config, "cache", None)  # absent with -p no:cacheprovider
            if cache is not None:
                cache.set = lambda key, value: None
        return (yield)

    def pytest_report_header(self) -> str:
        """Return the rank count."""
        return f"pipeproof: {self._side.ranks} ranks under torchrun, of which rank 0 reports"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember this rank's collection errors."""
        if report.failed:
            self._errors[report.nodeid] = report.longreprtext

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None]:
        """Adopt rank 0's order, or end all sessions if collected tests differ."""
        yield
        seed = getattr(self._config.option, "randomly_seed", None)
        mine = Collected(tuple(item.nodeid for item in items), self._errors, seed)
        try:
            what = "the end of collection"
            collected: list[Collected] = self._side.end_scope(mine, what=what, bound_s=self._bound_s)
        except RanksAbsent as absent:
            self._lost = str(absent)
            pytest.exit(self._lost, returncode=STUCK_STATUS)
        if unlike := difference(collected):
            pytest.exit(unlike, returncode=pytest.ExitCode.INTERRUPTED)
        place = {nodeid: index for index, nodeid in enumerate(collected[0].nodeids)}
        items.sort(key=lambda item: place[item.nodeid])
        if seed is not None:
            self._config.option.randomly_seed = collected[0].random_seed
        for item in items:
            if self._is_elsewhere(item) and isinstance(item, pytest.Function):
                item.fixturenames.clear()

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Leave single-rank tests to rank 0."""
        return True if self._is_elsewhere(pyfuncitem) else None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None]:
        """Mark reports during a call as subtests."""
        self._in_call = self._parts_agree = True
        try:
            return (yield)
        finally:
            self._in_call = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Merge each phase's reports over all ranks, so that all continue alike."""
        report = yield
        if self._lost or (self._in_call and not self._parts_agree):
            return report
        phase, at = Phase.of(report), {"bound_s": self._bound_s}
        try:
            if self._in_call:
                phases = self._side.gather(phase, what=f"a subtest of {item.nodeid}", **at)
            else:
                phases = self._side.end_scope(phase, what=f"the end of {report.when} of {item.nodeid}", **at)
        except RanksAbsent as absent:
            self._parts_agree = False  # the call's end will show which rank left it, and why
            if not self._in_call:
                self._give_up(item, report, phase, absent)
        else:
            settle(report, phases, rank=self._rank)
        return report

    def pytest_internalerror(self, excrepr: object) -> None:
        """Print internal errors even on silent ranks."""
        self._internal_error = str(excrepr)
        if self._rank != 0:
            sys.stderr.write(f"INTERNALERROR on rank {self._rank}: {excrepr}\n")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None]:
        """Agree on one exit status."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it at the first failing exit, and grants 30 s
        try:
            return (yield)
        finally:
            status = STUCK_STATUS if self._lost else int(session.exitstatus)
            session.exitstatus = max([status, *self._leave(status)])

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Exit after reports are written: torchrun ends all ranks once one has failed."""
        sys.stdout.flush()
        if not self._left:  # an error before the session: others must not wait
            self._side.leave(f"an error before its session began\n{self._internal_error}".strip())
        if self._rank == self._reporter:
            self._side.put("over", b"")
        else:
            self._side.wait_for("over", self._bound_s)
        self._watch.stop()
        side_store.cache_clear()  # earlier messages must not reach this process's next session

    def _is_elsewhere(self, item: pytest.Item) -> bool:
        return self._rank != 0 and item.get_closest_marker("pipeproof_one_rank") is not None

    def _give_up(self, item: pytest.Item, report: pytest.TestReport, phase: Phase, absent: RanksAbsent) -> None:
        self._lost = str(absent)
        item.session.shouldstop = self._lost.partition("\n")[0]  # the test's report has the rest
        self._reporter = min(rank for rank in range(self._side.ranks) if rank not in absent.reasons)
        found = stacks(self._side, [rank for rank in absent.reasons if not self._side.has_left(rank)])
        reports = of_absent(absent.reasons, self._side.ranks, found)
        reports[self._rank] = phase.report_of(self._rank)
        blame(report, reports, rank=self._rank)
        if self._rank == self._reporter != 0:
            sys.stderr.write(f"{describe(reports)}\n")

    def _leave(self, status: int) -> list[int]:
        """Announce departure. Returns other ranks' exit statuses, unless they are lost."""
        self._left = True
        self._side.put(f"status/{self._rank}", str(status).encode())
        self._side.leave(f"exit status {status}\n{self._internal_error}".strip())
        if self._lost:
            return []
        keys = [f"status/{rank}" for rank in range(self._side.ranks)]
        return [int(self._side.get(key) or STUCK_STATUS) for key in keys if self._side.wait_for(key, LAUNCHER_S)]

    def _end_early(self, number: int, frame: FrameType | None) -> None:
        """End the current test, so that its report names the lost rank."""
        self._side.hurry("before torchrun ended the session")
        if self._in_call:
            pytest.fail("torchrun ended the session, as the process of another rank has ended", pytrace=False)
