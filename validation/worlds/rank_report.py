"""Rank reports: each rank's ending in a run, and errors with the culprit first."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from textwrap import indent

from pipeproof.core.cause import Cause, OwnLine
from pipeproof.core.observe.stack import Line, Stack
from pipeproof.core.verdict import Verdict


def find_circles(waits: Mapping[int, Collection[int]]) -> list[tuple[int, ...]]:
    """Return rank groups that wait only for each other; a rank without a wait is its own group.

    ``waits``: for each rank, possible ranks it waits for. Every chain of waits ends in one of these groups.
    """

    def reach(rank: int) -> set[int]:
        """Return ``rank`` and all ranks it waits for, directly or indirectly."""
        found, left = {rank}, [rank]
        while left:
            new = set(waits.get(left.pop(), ())) - found
            found |= new
            left += new
        return found

    ends = {rank: reach(rank) for rank in {*waits, *(peer for peers in waits.values() for peer in peers)}}
    groups = {tuple(sorted(reached)) for rank, reached in ends.items() if all(rank in ends[one] for one in reached)}
    return sorted(groups)


# Messages about another rank's loss: true, but never the cause.
_SECONDARY = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|failed to recv, got 0 bytes|socket timeout"
    r"|application timeout caused pair closure|timed out waiting for clients"
    r"|torchrun ended the session|rank \d+ of \d+ did not come to .*",
    re.IGNORECASE,
)


_SHOWN = 4  # ranks named in a sentence


class Ending(StrEnum):
    """A rank's ending in a run."""

    FINISHED = "finished"
    RAISED = "raised"
    SKIPPED = "skipped"
    DIED = "died"  # its process ended
    ABSENT = "absent"  # it never joined the run
    STUCK = "stuck"  # unfinished at the bound
    STOPPED = "stopped"  # unfinished when another rank failed


_BLAME = {Ending.DIED: 0, Ending.SKIPPED: 0, Ending.RAISED: 0, Ending.ABSENT: 1, Ending.STUCK: 2}
_BLAME |= {Ending.STOPPED: 5, Ending.FINISHED: 6}  # the least is to blame


@dataclass(frozen=True)
class RankReport:
    """A rank's ending in a run.

    message: exception text, skip reason, or a phrase such as ``exited with status 3``. traceback: the exception's, or
    the stack of a rank that was ended. waiting: its declared wait. peers: possible ranks behind that wait; empty for
    all ranks with another wait, None if unknown. progress: such as ``sent 2 of 4``. at_s: wall clock at the end, in
    seconds since the epoch. payload: packed result of a finished rank, or its ValueError. groups: process groups left
    there by jobs. left: the job destroyed the group of all ranks, so its process can run no other. stack: user lines at
    the error or stop.
    """

    rank: int
    ending: Ending
    message: str = ""
    traceback: str = ""
    waiting: str | None = None
    at_s: float = 0.0
    peers: tuple[int, ...] | None = None
    payload: bytes = b""
    progress: str = ""
    groups: int = 0
    left: bool = False
    stack: Stack = ()

    @property
    def failed(self) -> bool:
        """True without a result."""
        return self.ending is not Ending.FINISHED

    @property
    def secondary(self) -> bool:
        """True if the failure merely reports another rank's loss."""
        return bool(self._echo)

    @property
    def _echo(self) -> str:
        # First line only: a report about several ranks has such lines for others, and a cause for itself.
        found = _SECONDARY.search(self.message.partition("\n")[0]) if self.ending is Ending.RAISED else None
        return found[0] if found else ""

    def sentence(self) -> str:
        """The ending as a predicate: ``raised ValueError: bad split``."""
        match self.ending:
            case Ending.FINISHED:
                return "finished"
            case Ending.RAISED:
                return f"raised {self.message}"
            case Ending.SKIPPED:
                return f"skipped alone: {self.message}"
            case Ending.STOPPED:
                return f"was waiting for {self.awaited}, stopped" if self.waiting else "had not finished, stopped"
            case _:
                return f"{self.message}, waiting for {self.awaited}" if self.waiting else self.message

    @property
    def awaited(self) -> str:
        """The wait, with progress."""
        return f"{self.waiting} (it {self.progress})" if self.progress else f"{self.waiting}"

    def line(self) -> str:
        """Return one line, for ranks besides the culprit."""
        if self.secondary:
            return f"rank {self.rank}: lost the others: {self._echo}"
        first, *more = self.sentence().splitlines()
        return f"rank {self.rank}: {first}{' ...' if more else ''}"


def culprit_of(reports: Sequence[RankReport]) -> int:
    """Return the rank to blame: the earliest failure that echoes no other.

    If all ranks wait, blame the first that others wait for. Times of stuck ranks mean nothing, so equal waits always
    blame the first rank.
    """
    if blocking := _blocking(reports):
        return blocking[0][0]

    def blame(report: RankReport) -> tuple[int, float, int]:
        stuck = report.ending is Ending.STUCK
        level = 4 if report.secondary else _BLAME[report.ending]
        level += stuck and bool(report.waiting)  # an endless computation outranks waits for it
        return level, 0.0 if stuck else report.at_s, report.rank

    return min(reports, key=blame).rank


def _blocking(reports: Sequence[RankReport]) -> Sequence[tuple[int, ...]]:
    """Return rank groups that wait for each other, or for a returned rank, and block all others.

    Empty if a rank failed by itself, or if waits are unknown.
    """
    waiting = [report for report in reports if report.ending is Ending.STUCK]
    known = [report for report in waiting if report.waiting and report.peers is not None]
    ended = [report for report in reports if report.ending is Ending.FINISHED]
    if not waiting or len(known) < len(waiting) or len(waiting) + len(ended) < len(reports):
        return ()
    waits = {report.rank: _peers(report, reports) for report in waiting}
    return find_circles(waits) if all(waits.values()) else ()


def _peers(report: RankReport, reports: Sequence[RankReport]) -> tuple[int, ...]:
    """Return possible ranks behind a wait, without those in the same wait: they wait together."""
    expected = report.peers or [other.rank for other in reports]
    others = (other.rank for other in reports if other.rank in expected and other.waiting != report.waiting)
    return tuple(others) or report.peers or ()


def headline(reports: Sequence[RankReport]) -> str:
    """Summarize in one sentence: the culprit's act, or a circular wait."""
    blocking, by_rank = _blocking(reports), {report.rank: report for report in reports}
    if not blocking:
        culprit = by_rank[culprit_of(reports)]
        return f"rank {culprit.rank} {culprit.sentence().partition(chr(10))[0]}"
    groups = []
    for group in blocking[:_SHOWN]:
        *some, last = map(str, group)
        if some:
            waits = ", ".join(f"rank {rank} for {by_rank[rank].awaited}" for rank in group[:_SHOWN])
            more = f", and {len(group) - _SHOWN} more" if len(group) > _SHOWN else ""
            groups.append(f"ranks {', '.join(some)} and {last} wait for each other: {waits}{more}")
            continue
        waiting = [one for one in reports if one.ending is Ending.STUCK and group[0] in _peers(one, reports)]
        waits = "; ".join(f"rank {one.rank} waits for {one.awaited}" for one in waiting[:_SHOWN])
        more = f"; and {len(waiting) - _SHOWN} more" if len(waiting) > _SHOWN else ""
        groups.append(f"rank {last} has returned while others wait for it: {waits}{more}")
    if len(blocking) > _SHOWN:
        groups.append(f"{len(blocking) - _SHOWN} more such groups")
    return "; ".join(groups)


def describe(reports: Sequence[RankReport]) -> str:
    """Return the full report: culprit with traceback, then one line per rank, echoes last."""
    return "\n".join(_paragraph(heading, body) for heading, body in _story(reports))


def details(reports: Sequence[RankReport]) -> str:
    """Return the report beyond ``headline``: tracebacks, and other ranks."""
    (_, body), *others = _story(reports)
    return "\n".join([*([body.rstrip()] if body.strip() else []), *(_paragraph(*one) for one in others)])


def _story(reports: Sequence[RankReport]) -> Sequence[tuple[str, str]]:
    """Return sentences, each with its traceback or stack."""
    if blocking := _blocking(reports):
        those = {rank for group in blocking for rank in group}
        first = sorted(reports, key=lambda report: (report.rank not in those, report.rank))
        return [(headline(reports), ""), *((replace(report, progress="").line(), report.traceback) for report in first)]
    culprit = next(report for report in reports if report.rank == culprit_of(reports))
    alike = len({(report.ending, report.message) for report in reports}) == 1
    if alike and len(reports) > 1 and culprit.ending is not Ending.STUCK:  # each is stuck somewhere else
        return [(f"all {len(reports)} ranks {re.sub('^was ', 'were ', culprit.sentence())}", culprit.traceback)]
    lines = [(f"rank {culprit.rank} of {len(reports)} {culprit.sentence()}", culprit.traceback)]
    others = [report for report in reports if report is not culprit]
    for report in sorted(others, key=lambda report: (report.secondary, report.rank)):
        stack = report.traceback if report.ending in (Ending.STUCK, Ending.ABSENT) else ""
        lines.append((report.line(), stack))
    return lines


def _paragraph(heading: str, body: str) -> str:
    return f"{heading}\n{indent(body.rstrip(), '    ')}" if body.strip() else heading


def of_absent(reasons: Mapping[int, str], ranks: int, stacks: Mapping[int, str]) -> list[RankReport]:
    """Return reports for a run that some ranks never joined; ``stacks`` if known."""
    return [
        RankReport(rank, Ending.ABSENT, reasons[rank], stacks.get(rank, ""))
        if rank in reasons
        else RankReport(rank, Ending.STOPPED)
        for rank in range(ranks)
    ]


class Race(ValueError):
    """A misused buffer in flight, or a mismatched collective.

    kind: the verdict's cause kind. rank: the offender. said: a sentence. lines: user code lines, each with its
    action.
    """

    def __init__(self, kind: str, rank: int, said: str, lines: tuple[tuple[str, Line], ...] = ()) -> None:
        super().__init__(kind, rank, said, lines)
        self.kind = kind
        self.rank = rank
        self.said = said
        self.lines = lines

    def __str__(self) -> str:
        return "\n".join([self.said, *(f"{what} {line}" for what, line in self.lines)])


class WorldError(RuntimeError):
    """A run did not return every rank's result."""


class NeedsMoreRanks(WorldError):
    """A run needs more ranks than the launcher started."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(needed, available)
        self.needed = needed
        self.available = available

    def __str__(self) -> str:
        return f"needs {self.needed} ranks, {self.available} here"


class RankFailed(WorldError):
    """At least one rank failed. ``str`` puts the culprit first.

    culprit: its rank. reports: one per rank, in rank order. cause: the culprit's exception, if it is a ValueError (bad
    input) and could be sent here, else None.
    """

    def __init__(self, reports: Sequence[RankReport], cause: ValueError | None = None) -> None:
        super().__init__(tuple(reports), cause)
        self.reports = tuple(reports)
        self.culprit = culprit_of(reports)
        self.cause = cause

    @property
    def hang(self) -> bool:
        """True if ranks waited until a bound, rather than raised or died."""
        culprit = self.reports[self.culprit]
        late = culprit.ending is Ending.RAISED and "Timeout" in culprit.message.partition(":")[0]
        return late or culprit.ending in (Ending.STUCK, Ending.FINISHED)  # others wait for a returned rank

    def __str__(self) -> str:
        return describe(self.reports)


def of_failure(verdict: Verdict, failure: RankFailed) -> Verdict:
    """Return ``verdict`` for failed ranks, with nothing to judge. A race still counts as a fault."""
    reported = with_reports(verdict, failure.reports)
    if isinstance(race := failure.cause, Race):
        lines = tuple(OwnLine(what, line) for what, line in race.lines)
        cause = Cause(race.kind, rank=race.rank, detail=race.said, lines=lines)
        return replace(reported, outcome="fail", headline=race.said, causes=(cause,))
    return replace(reported, headline=headline(failure.reports), ended="hang" if failure.hang else "error")


def with_reports(verdict: Verdict, reports: Sequence[RankReport]) -> Verdict:
    """Add rank reports to ``verdict``: the culprit's stack, and a line for each rank beyond its headline."""
    culprit = next(report for report in reports if report.rank == culprit_of(reports))
    if culprit.ending is not Ending.STUCK:
        ranks = tuple(heading for heading, _ in _story(reports)[1:])
        return replace(verdict, failure=details(reports), failed_at=culprit.stack, ranks=ranks)
    every = sorted(reports, key=lambda report: report.rank != culprit.rank)
    places = [f", at {one.stack[0].place}" if one.stack else "" for one in every]
    ranks = tuple(f"{replace(one, progress='').line()}{at}" for one, at in zip(every, places, strict=True))
    return replace(verdict, failure=details(reports), failed_at=(), ranks=ranks)
