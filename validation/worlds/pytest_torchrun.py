"""pytest under torchrun: the ranks agree on what to run and on what came of it, and rank 0 reports."""

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


STUCK_STATUS = 3


class Watch:
    """Watches one rank, from a thread of its own, for the moment at which the others have given it up."""

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
                self._side.put(f"stack/{rank}", _stack(self._watched).encode())
                self._side.wait_for("over", LAUNCHER_S)
                os._exit(STUCK_STATUS)  # the watched thread may be where nothing but this can end it


def _stack(thread: int) -> str:
    frames = traceback.extract_stack(sys._current_frames()[thread])
    pytests = [index for index, frame in enumerate(frames) if "_pytest" in frame.filename or "pluggy" in frame.filename]
    own = frames[pytests[-1] + 1 :] if pytests else []
    return "".join(traceback.format_list(own or frames))


def stacks(side: SideStore, ranks: Collection[int]) -> dict[int, str]:
    """Where these ranks are stuck, within a bound. From then on they end as soon as the session is over."""
    if side.hurried:  # they are gone, and there is no time
        return {}
    for rank in ranks:
        side.put(f"stack wanted/{rank}", b"")
    deadline_s = time.monotonic() + END_S
    told = {}
    for rank in ranks:
        side.wait_for(f"stack/{rank}", deadline_s - time.monotonic())
        told[rank] = (side.get(f"stack/{rank}") or b"in native code, or gone").decode()
    return told


@dataclass(frozen=True)
class Collected:
    """One rank's tests in its order, what it could not collect and why, and the seed that pytest-randomly drew."""

    nodeids: Sequence[str]
    errors: Mapping[str, str]
    random_seed: int | None = None


def difference(collected: Sequence[Collected]) -> str:
    """How the ranks' tests differ, whatever their order; empty where they do not."""
    everything = dict.fromkeys(nodeid for its in collected for nodeid in its.nodeids)
    lines = []
    for rank, its in enumerate(collected):
        if lacks := [nodeid for nodeid in everything if nodeid not in its.nodeids]:
            from pipeproof.pipeline.sizes import first_few  # numpy comes with it: not before it is needed

            lines.append(f"rank {rank} lacks {first_few(lacks)}")
        for path, text in its.errors.items():
            if any(path not in other.errors for other in collected):
                lines.append(f"rank {rank} cannot collect {path}:\n{indent(text, '    ')}")
    return "\n".join(["the ranks collected different tests", *lines]) if lines else ""


_REPORT_FILES = ("xmlpath", "htmlpath", "report_log", "log_file")  # options; one writer each, or the last one wins


class RanksTogether:
    """The plugin of one rank. All of them go through the same phases of the same tests, each knowing all outcomes."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._bound_s: float = config.getoption("--pipeproof-rank-timeout")
        self._side = side_store()
        self._rank = self._side.rank
        self._reporter = 0  # the rank that tells the user
        self._lost = ""  # why the ranks cannot agree any more
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
        """Only rank 0 speaks and writes, all draw the same from hypothesis, and rank 0 survives torchrun's end."""
        _derandomize()
        if self._rank == 0:
            signal.signal(signal.SIGTERM, self._end_early)
        else:
            _silence(self._config)
        return (yield)

    def pytest_report_header(self) -> str:
        """How many ranks there are."""
        return f"pipeproof: {self._side.ranks} ranks under torchrun, of which rank 0 reports"

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Remember what this rank could not collect."""
        if report.failed:
            self._errors[report.nodeid] = report.longreprtext

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None]:
        """Take rank 0's order, or end every rank's session where they did not collect the same tests."""
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
        """Leave a test for one rank to rank 0."""
        return True if self._is_elsewhere(pyfuncitem) else None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self) -> Generator[None]:
        """Know that a report made during a call is of a part of it, a subtest."""
        self._in_call = self._parts_agree = True
        try:
            return (yield)
        finally:
            self._in_call = False

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Make every rank's report of a phase the report of all ranks, so that they all go on alike."""
        report = yield
        if self._lost:
            return report
        if not self._in_call:
            self._agree_on_phase(item, report)
        elif self._parts_agree:
            self._agree_on_part(item, report)
        return report

    def pytest_internalerror(self, excrepr: object) -> None:
        """Show an internal error also where the terminal is silent."""
        self._internal_error = str(excrepr)
        if self._rank != 0:
            sys.stderr.write(f"INTERNALERROR on rank {self._rank}: {excrepr}\n")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None]:
        """End with one exit status."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, at the first failing exit, and it grants 30 s
        try:
            return (yield)
        finally:
            status = STUCK_STATUS if self._lost else int(session.exitstatus)
            session.exitstatus = max([status, *self._leave(status)])

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """End after the reports have been written: torchrun ends all ranks as soon as one has failed."""
        sys.stdout.flush()
        if not self._left:  # an error before the session began: the others must not wait for this rank
            self._side.leave(f"an error before its session began\n{self._internal_error}".strip())
        if self._rank == self._reporter:
            self._side.put("over", b"")
        else:
            self._side.wait_for("over", self._bound_s)
        self._watch.stop()
        side_store.cache_clear()  # what was said in this session is no word for the next one in this process

    def _is_elsewhere(self, item: pytest.Item) -> bool:
        return self._rank != 0 and item.get_closest_marker("pipeproof_one_rank") is not None

    def _agree_on_phase(self, item: pytest.Item, report: pytest.TestReport) -> None:
        phase, what = Phase.of(report), f"the end of {report.when} of {item.nodeid}"
        try:
            told = self._side.end_scope(phase, what=what, bound_s=self._bound_s)
        except RanksAbsent as absent:
            self._give_up(item, report, phase, absent)
        else:
            settle(report, told, rank=self._rank)

    def _agree_on_part(self, item: pytest.Item, report: pytest.TestReport) -> None:
        try:
            told = self._side.gather(Phase.of(report), what=f"a subtest of {item.nodeid}", bound_s=self._bound_s)
        except RanksAbsent:
            self._parts_agree = False  # the end of the call will tell which rank left it, and why
        else:
            settle(report, told, rank=self._rank)

    def _give_up(self, item: pytest.Item, report: pytest.TestReport, phase: Phase, absent: RanksAbsent) -> None:
        self._lost = str(absent)
        item.session.shouldstop = self._lost.partition("\n")[0]  # the test's report has the rest
        self._reporter = min(rank for rank in range(self._side.ranks) if rank not in absent.reasons)
        told = stacks(self._side, [rank for rank in absent.reasons if not self._side.has_left(rank)])
        reports = of_absent(absent.reasons, self._side.ranks, told)
        reports[self._rank] = phase.seen_by(self._rank)
        blame(report, reports, rank=self._rank)
        if self._rank == self._reporter != 0:
            sys.stderr.write(f"{describe(reports)}\n")

    def _leave(self, status: int) -> list[int]:
        """Say that this rank leaves; the exit statuses of the others, unless they are lost."""
        self._left = True
        self._side.put(f"status/{self._rank}", str(status).encode())
        self._side.leave(f"exit status {status}\n{self._internal_error}".strip())
        if self._lost:
            return []
        keys = [f"status/{rank}" for rank in range(self._side.ranks)]
        return [int(self._side.get(key) or STUCK_STATUS) for key in keys if self._side.wait_for(key, LAUNCHER_S)]

    def _end_early(self, number: int, frame: FrameType | None) -> None:
        """End the test in progress, so that there is a report that names the rank whose process is gone."""
        self._side.hurry("before torchrun ended the session")
        if self._in_call:
            pytest.fail("torchrun ended the session, as the process of another rank has ended", pytrace=False)


def _derandomize() -> None:
    """Let hypothesis draw the same examples on every rank. The profile in force keeps its other settings."""
    from hypothesis import settings

    settings.register_profile("torchrun", parent=settings(), derandomize=True, database=None, deadline=None)
    settings.load_profile("torchrun")


def _silence(config: pytest.Config) -> None:
    """Let this rank's pytest write neither to the terminal nor to the cache."""
    config.get_terminal_writer()._file = open(os.devnull, "w")
    cache = getattr(config, "cache", None)  # absent with -p no:cacheprovider
    if cache is not None:
        cache.set = _forget


def _forget(key: str, value: object) -> None:
    """In the place of writing to the cache."""
