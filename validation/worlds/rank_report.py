"""What became of each rank of a run, and the errors that tell it with the culprit first."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from textwrap import indent

from pipeproof.core.cause import Cause, OwnLine
from pipeproof.core.observe.stack import Line, Stack
from pipeproof.core.verdict import Verdict


def unfreed(waits: Mapping[int, Collection[int]]) -> list[tuple[int, ...]]:
    """The groups of ranks that wait for none but each other; one that waits for nobody is such a group by itself.

    ``waits``: for each rank those that it may be waiting for. Whichever it is, it leads to one of these groups.
    """
    ends = {rank: _reached(rank, waits) for rank in {*waits, *(peer for peers in waits.values() for peer in peers)}}
    groups = {tuple(sorted(reached)) for rank, reached in ends.items() if all(rank in ends[one] for one in reached)}
    return sorted(groups)


def _reached(rank: int, waits: Mapping[int, Collection[int]]) -> set[int]:
    """``rank`` and all that it waits for, directly or through others."""
    found, left = {rank}, [rank]
    while left:
        new = set(waits.get(left.pop(), ())) - found
        found |= new
        left += new
    return found


# What a rank says when another rank has gone: true, but never the cause.
_SECONDARY = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|failed to recv, got 0 bytes|socket timeout"
    r"|application timeout caused pair closure|timed out waiting for clients"
    r"|torchrun ended the session|rank \d+ of \d+ did not come to .*",
    re.IGNORECASE,
)


_SHOWN = 4  # ranks in a sentence


class Ending(StrEnum):
    """How a rank's part of a run ended."""

    FINISHED = "finished"
    RAISED = "raised"
    SKIPPED = "skipped"
    DIED = "died"  # its process ended
    ABSENT = "absent"  # it never came to the run
    STUCK = "stuck"  # it had not ended when the bound was reached
    STOPPED = "stopped"  # it had not ended when another rank failed


@dataclass(frozen=True)
class RankReport:
    """How one rank's part of a run ended.

    ``message`` is the exception as text, the reason of a skip, or a phrase such as ``exited with status 3``;
    ``traceback`` the traceback of the exception, or the stack of a rank that had to be ended; ``waiting`` what such a
    rank said it was waiting for; ``peers`` are the ranks that this may be, none where it is every rank that does not
    wait for the same, and None where that is not known; ``progress`` is how far it had come, as ``sent 2 of 4``;
    ``at_s`` is the wall clock at the end, in seconds since the epoch.
    ``payload`` is, as bytes, the result of a rank that finished, or the ValueError that ended it. ``groups``: how many
    process groups jobs have left there so far. ``left``: the job has destroyed the group of all ranks: its process can
    run no other. ``stack``: the lines of the user's own code in which it raised, or was.
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
        """Whether there is no result."""
        return self.ending is not Ending.FINISHED

    @property
    def secondary(self) -> bool:
        """Whether this failure only says that another rank has gone."""
        return bool(self._echo)

    @property
    def _echo(self) -> str:
        # Only of the first line: a story of several ranks has such lines about the others, and a cause of its own.
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
        """What it was waiting for, and how far it had come."""
        return f"{self.waiting} (it {self.progress})" if self.progress else f"{self.waiting}"

    def line(self) -> str:
        """One line about a rank that is not the culprit."""
        if self.secondary:
            return f"rank {self.rank}: lost the others: {self._echo}"
        first, *more = self.sentence().splitlines()
        return f"rank {self.rank}: {first}{' ...' if more else ''}"


def culprit_of(reports: Sequence[RankReport]) -> int:
    """The rank to blame: the earliest failure that is not merely the echo of another rank's.

    Of ranks that all wait, the first of those for which the others do. When a rank was found to be stuck says nothing:
    of those that wait alike the first is named, on every run.
    """
    if blocking := _blocking(reports):
        return blocking[0][0]

    def blame(report: RankReport) -> tuple[int, float, int]:
        match report.ending:
            case Ending.DIED | Ending.SKIPPED:
                level = 0
            case Ending.RAISED:
                level = 4 if report.secondary else 0
            case Ending.ABSENT:
                level = 1
            case Ending.STUCK:  # a rank that computes for ever is to blame before one that waits for it
                level = 3 if report.waiting else 2
            case Ending.STOPPED:
                level = 5
            case Ending.FINISHED:
                level = 6
        return level, 0.0 if report.ending is Ending.STUCK else report.at_s, report.rank

    return min(reports, key=blame).rank


def _blocking(reports: Sequence[RankReport]) -> Sequence[tuple[int, ...]]:
    """The groups of ranks that wait for each other, or one that has returned, for which all that have not ended wait.

    Empty where some rank failed by itself, or where it is not known who waits for whom.
    """
    waiting = [report for report in reports if report.ending is Ending.STUCK]
    known = [report for report in waiting if report.waiting and report.peers is not None]
    ended = [report for report in reports if report.ending is Ending.FINISHED]
    if not waiting or len(known) < len(waiting) or len(waiting) + len(ended) < len(reports):
        return ()
    waits = {report.rank: _peers(report, reports) for report in waiting}
    return unfreed(waits) if all(waits.values()) else ()


def _peers(report: RankReport, reports: Sequence[RankReport]) -> tuple[int, ...]:
    """Of the ranks that it may be waiting for those that do not wait for the same: with these it waits together."""
    due = report.peers or [other.rank for other in reports]
    others = (other.rank for other in reports if other.rank in due and other.waiting != report.waiting)
    return tuple(others) or report.peers or ()


def headline(reports: Sequence[RankReport]) -> str:
    """The story in a sentence: what the culprit did, or who waits for whom."""
    if blocking := _blocking(reports):
        more = [f"{len(blocking) - _SHOWN} more such groups"] if len(blocking) > _SHOWN else []
        return "; ".join([*(_blocked(one, reports) for one in blocking[:_SHOWN]), *more])
    culprit = next(report for report in reports if report.rank == culprit_of(reports))
    return f"rank {culprit.rank} {culprit.sentence().partition(chr(10))[0]}"


def _blocked(blocking: Sequence[int], reports: Sequence[RankReport]) -> str:
    """Who waits for these ranks, and why they do not end that."""
    by_rank = {report.rank: report for report in reports}
    if len(blocking) > 1:
        told = ", ".join(f"rank {rank} for {by_rank[rank].awaited}" for rank in blocking[:_SHOWN])
        more = f", and {len(blocking) - _SHOWN} more" if len(blocking) > _SHOWN else ""
        *some, last = map(str, blocking)
        return f"ranks {', '.join(some)} and {last} wait for each other: {told}{more}"
    (ended,) = blocking
    waiting = [one for one in reports if one.ending is Ending.STUCK and ended in _peers(one, reports)]
    told = "; ".join(f"rank {one.rank} waits for {one.awaited}" for one in waiting[:_SHOWN])
    more = f"; and {len(waiting) - _SHOWN} more" if len(waiting) > _SHOWN else ""
    return f"rank {ended} has returned while others wait for it: {told}{more}"


def describe(reports: Sequence[RankReport]) -> str:
    """The whole story: the culprit with its traceback, then a line for each other rank, echoes last."""
    return "\n".join(_paragraph(heading, body) for heading, body in _story(reports))


def details(reports: Sequence[RankReport]) -> str:
    """What ``headline`` leaves out of the story: tracebacks, and the other ranks."""
    (_, body), *others = _story(reports)
    return "\n".join([*([body.rstrip()] if body.strip() else []), *(_paragraph(*one) for one in others)])


def summarise(reports: Sequence[RankReport]) -> tuple[Stack, tuple[str, ...]]:
    """Where the culprit raised, and the story in a line for each rank that ``headline`` does not tell all of."""
    culprit = next(report for report in reports if report.rank == culprit_of(reports))
    if culprit.ending is not Ending.STUCK:
        return culprit.stack, tuple(heading for heading, _ in _story(reports)[1:])
    every = sorted(reports, key=lambda report: report.rank != culprit.rank)
    return (), tuple(f"{replace(one, progress='').line()}{_at(one)}" for one in every)


def _at(report: RankReport) -> str:
    return f", at {report.stack[0].place}" if report.stack else ""


def _story(reports: Sequence[RankReport]) -> Sequence[tuple[str, str]]:
    """Sentences, each with the traceback or the stack that belongs to it."""
    if blocking := _blocking(reports):
        those = {rank for group in blocking for rank in group}
        first = sorted(reports, key=lambda report: (report.rank not in those, report.rank))
        return [(headline(reports), ""), *((replace(report, progress="").line(), report.traceback) for report in first)]
    culprit = next(report for report in reports if report.rank == culprit_of(reports))
    alike = len({(report.ending, report.message) for report in reports}) == 1
    if alike and len(reports) > 1 and culprit.ending is not Ending.STUCK:  # each is stuck in a place of its own
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
    """The reports of a run of so many ranks to which some did not come, for these reasons; ``stacks`` where known."""
    return [
        RankReport(rank, Ending.ABSENT, reasons[rank], stacks.get(rank, ""))
        if rank in reasons
        else RankReport(rank, Ending.STOPPED)
        for rank in range(ranks)
    ]


class Race(ValueError):
    """What code did with a buffer that was on its way, or a collective that ranks did not call alike.

    ``kind`` is one of a verdict's causes, ``rank`` the one that did it, ``said`` a sentence. ``lines``: of the user's
    own code, each with what ran there.
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
    """A run on a world did not give every rank's result."""


class NeedsMoreRanks(WorldError):
    """A run wants more ranks than the launcher started."""

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(needed, available)
        self.needed = needed
        self.available = available

    def __str__(self) -> str:
        return f"needs {self.needed} ranks, {self.available} here"


class RankFailed(WorldError):
    """At least one rank failed. ``str`` puts the culprit first.

    ``culprit`` is its rank, ``reports`` has one report for each rank in rank order, and ``cause`` is the culprit's
    own exception where that is a ValueError (somebody's input was bad) and could be sent here, else None.
    """

    def __init__(self, reports: Sequence[RankReport], cause: ValueError | None = None) -> None:
        super().__init__(tuple(reports), cause)
        self.reports = tuple(reports)
        self.culprit = culprit_of(reports)
        self.cause = cause

    @property
    def hang(self) -> bool:
        """Whether ranks waited until a bound was reached, rather than raised or died."""
        culprit = self.reports[self.culprit]
        late = culprit.ending is Ending.RAISED and "Timeout" in culprit.message.partition(":")[0]
        return late or culprit.ending in (Ending.STUCK, Ending.FINISHED)  # one that has returned is waited for

    def __str__(self) -> str:
        return describe(self.reports)


def of_failure(verdict: Verdict, failure: RankFailed) -> Verdict:
    """``verdict``, where ranks failed and there is nothing to judge. A race is a fault all the same."""
    reported = with_reports(verdict, failure.reports)
    if isinstance(race := failure.cause, Race):
        lines = tuple(OwnLine(what, line) for what, line in race.lines)
        cause = Cause(race.kind, rank=race.rank, detail=race.said, lines=lines)
        return replace(reported, verdict="fail", headline=race.said, cause=(cause,))
    return replace(reported, headline=headline(failure.reports), ended="hang" if failure.hang else "error")


def with_reports(verdict: Verdict, reports: Sequence[RankReport]) -> Verdict:
    """``verdict``, with what became of ranks."""
    failed_at, ranks = summarise(reports)
    return replace(verdict, failure=details(reports), failed_at=failed_at, ranks=ranks)
