"""A whole run in this process: every rank's part of a job, and how each ended."""

import gc
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn

from pipeproof.pipeline.transports import RULES
from pipeproof.pipeline.waiting import current
from pipeproof.worlds.posted_messages import progress
from pipeproof.worlds.rank_report import Ending, RankReport
from pipeproof.worlds.shipping import unpack_job
from pipeproof.worlds.simulated.adversaries import Adversary, Fair
from pipeproof.worlds.simulated.ahead import Ahead
from pipeproof.worlds.simulated.clock import Clock, virtual_time
from pipeproof.worlds.simulated.exploration import Course
from pipeproof.worlds.simulated.group import GROUPS, Bare, Net, messages
from pipeproof.worlds.simulated.guide import Guide
from pipeproof.worlds.simulated.guided import Guided
from pipeproof.worlds.simulated.history import History
from pipeproof.worlds.simulated.meanings import NotSimulated
from pipeproof.worlds.simulated.network import Network
from pipeproof.worlds.simulated.own_modules import OwnModules, attributes
from pipeproof.worlds.simulated.own_state import OwnState
from pipeproof.worlds.simulated.patience import WHOLE, held_up
from pipeproof.worlds.simulated.rank import Rank
from pipeproof.worlds.simulated.scheduler import Scheduler, Seat
from pipeproof.worlds.simulated.shared_store import SharedStore
from pipeproof.worlds.simulated.torch_inside import asked_for_numbers, before_backwards, one_profiler, standing_in
from pipeproof.worlds.simulation import Manner
from pipeproof.worlds.stack import stack_of
from pipeproof.worlds.timeout import END_S
from pipeproof.worlds.worker import RankContext, obey, stack_text

_MOST_AHEAD = 16  # runs in which programs go ahead of devices: what each foresees is the last one's


@dataclass(frozen=True)
class RunOrder:
    """What to run: a packed job, on so many ranks, in some manner.

    ``timeout_s`` bounds, in seconds of the clock, what does not move on: a loop, a lock. What does may take ``WHOLE``
    times as long, and no longer.
    """

    job: bytes
    ranks: int
    timeout_s: float
    manner: Manner


@dataclass(frozen=True)
class Played:
    """Every rank's report. ``sound``: no rank's thread is left, so that this process can have another run.

    ``course``: what happened, where that is noted. ``in_time``: no rank was out of the network when the bound came.
    ``may_end``: it is a hang, and ends where programs go on while their devices wait; with what numbers is not known.
    """

    reports: tuple[RankReport, ...]
    sound: bool
    course: Course | None = None
    in_time: bool = True
    may_end: bool = False

    @property
    def hangs(self) -> bool:
        """Whether ranks wait for ever."""
        return self.sound and self.in_time and any(report.ending is Ending.STUCK for report in self.reports)


def play(context: Any, order: RunOrder) -> Played:
    """Run ``order``; a job for a process of its own. The process is afterwards as it was before."""
    del context
    until_s = perf_counter() + WHOLE * order.timeout_s
    played = _played(order, WHOLE * order.timeout_s)
    if not played.hangs or not RULES[order.manner.transport].on_stream:
        return played
    return _played_ahead(order, played, until_s=until_s)


def _played_ahead(order: RunOrder, hung: Played, *, until_s: float) -> Played:
    """What becomes of a run that hangs where programs go on while devices wait; ``hung`` where that is not known."""
    ahead, played = Ahead({}), hung
    for _ in range(_MOST_AHEAD):
        left_s = until_s - perf_counter()
        if left_s <= 0:
            return hung
        ahead = Ahead(ahead.came)
        played = _played(order, left_s, ahead)
        if not played.sound:
            return replace(hung, sound=False)
        if ahead.settled or ahead.raced or played.hangs:
            break
    done = ahead.raced or (ahead.settled and not ahead.missing)  # a race is one whatever comes
    if done and not played.hangs:
        return replace(played, course=None if played.course is None else replace(played.course, ahead=True))
    return replace(hung, may_end=ahead.may_end or not played.hangs)


def _played(order: RunOrder, whole_s: float, ahead: Ahead | None = None) -> Played:
    before = attributes() if order.manner.own_modules else {}
    with virtual_time():
        with suppress(Exception):  # each rank meets it again, and says so
            unpack_job(order.job)  # what it imports is there before anybody's state is noted
        modules = OwnModules(order.manner.own_modules)
        modules.have_replaced(before)
        own = OwnState.now(modules)
        try:
            return _SimulatedRun(order, modules, ahead).played(whole_s)
        finally:
            own.take()
            Net.current = None
            if order.manner.own_modules:
                gc.collect()  # what ends with an engine may import, and must not do so amid the next run's imports


def _checked(modules: OwnModules, order: bytes, context: RankContext) -> object:
    """A rank's part of a packed job. Raises where what it has imported on its way is shared and should not be."""
    __tracebackhide__ = True
    result = obey(order, context)
    modules.check()
    return result


class _SimulatedRun:
    """A run from its first turn to its last."""

    def __init__(self, order: RunOrder, modules: OwnModules, ahead: Ahead | None) -> None:
        self._order, self._modules = order, modules
        self._told: dict[int, _WaitingRank] = {}
        self._seats = [Seat(rank, OwnState.now(modules), Clock(order.manner.timing)) for rank in range(order.ranks)]
        self._history = History() if order.manner.noted or isinstance(order.manner.interleaving, Guide) else None
        adversary = self._adversary = _adversary(order, self._history)
        self._scheduler = Scheduler(self._seats, adversary, stuck=self._note_stuck, history=self._history, ahead=ahead)
        self._network = Network(
            self._scheduler,
            RULES[order.manner.transport],
            latency_s=order.manner.timing.latency_s,
            fine=order.manner.fine,
            room=0 if RULES[order.manner.transport].by_name else order.manner.room,
        )
        Net.current = Net(self._network)

    def played(self, whole_s: float) -> Played:
        NotSimulated.refusals.clear()
        order, store, network = self._order, SharedStore(self._scheduler), self._network
        with ExitStack() as opened:
            opened.enter_context(standing_in(GROUPS, Bare, messages(), batch=network.batch))
            opened.enter_context(one_profiler(_refuse_profiler))
            if self._scheduler.ahead is not None:
                maybe = partial(network.works.catch_up, surely=False)
                opened.enter_context(before_backwards(maybe))
                opened.enter_context(asked_for_numbers(maybe, synchronize=network.works.catch_up))
            job = partial(_checked, self._modules, order.job)
            threads = [Rank(rank, order.ranks, job, store, self._network) for rank in range(order.ranks)]
            for seat, thread in zip(self._seats, threads, strict=True):
                seat.state, seat.thread = OwnState.fresh(seat.rank, self._modules), thread
                thread.start()
            self._scheduler.begin()
            if held := held_up(self._scheduler, timeout_s=order.timeout_s, whole_s=whole_s):
                if self._scheduler.over:
                    return Played(self._reports(threads), sound=False, in_time=False)
                self._note_late()
                return Played(self._late(threads, held), sound=False, in_time=False)
            for thread in threads:
                thread.join(END_S)
        sound = not any(thread.is_alive() for thread in threads)
        return Played(self._reports(threads), sound, self._course())

    def _reports(self, threads: list[Rank]) -> tuple[RankReport, ...]:
        return _as_refused([self._report(thread, rank) for rank, thread in enumerate(threads)], threads)

    def _course(self) -> Course | None:
        if self._history is None or not self._order.manner.noted:
            return None
        events, by = self._history.events, self._adversary
        if not isinstance(by, Guided):
            return Course(events)
        return Course(events[: by.redundant], redundant=by.redundant is not None, astray=by.astray is not None)

    def _note_stuck(self) -> None:
        """Where every rank is, and what it waits for: once they give up, nobody can tell. No rank is running."""
        for seat in self._seats:
            if not seat.ended:
                seat.state.take()  # what a rank knows of itself it says as a rank does that has a process
                self._told[seat.rank] = _WaitingRank.of(seat, current(), progress())
        self._seats[self._scheduler.running].state.take()

    def _note_late(self) -> None:
        """The same while one rank goes on, whose state nobody may touch."""
        for seat in self._seats:
            if not seat.ended:
                self._told[seat.rank] = _WaitingRank.of(seat, None, "")

    def _report(self, thread: Rank, rank: int) -> RankReport:
        if thread.report is not None:
            return thread.report
        place = self._told.get(rank, _WaitingRank())
        if any(one.report is not None and one.report.failed for one in self._threads()):
            return place.report(rank, Ending.STOPPED, "")
        return place.report(rank, Ending.STUCK, f"can never go on{place.line}")

    def _threads(self) -> list[Rank]:
        return [seat.thread for seat in self._seats if isinstance(seat.thread, Rank)]

    def _late(self, threads: list[Rank], held: str) -> tuple[RankReport, ...]:
        """The rank that has the turn keeps it; the others are as they are."""
        running, reports = self._scheduler.running, []
        for rank, thread in enumerate(threads):
            place = self._told.get(rank, _WaitingRank())
            stopped = (Ending.STUCK, held) if rank == running else (Ending.STOPPED, "")
            reports.append(thread.report or place.report(rank, *stopped))
        return _as_refused(reports, threads)


def _as_refused(reports: Sequence[RankReport], threads: Sequence[Rank]) -> tuple[RankReport, ...]:
    """``reports``; once something was refused that is what became of the run, whoever caught it or waits for it."""
    if not NotSimulated.refusals or any(NotSimulated.__name__ in one.message for one in reports):
        return tuple(reports)
    thread, told = NotSimulated.refusals[0]
    rank = next((number for number, one in enumerate(threads) if one is thread), 0)
    found = [replace(one, ending=Ending.STOPPED) if one.ending is Ending.STUCK else one for one in reports]
    refused = f"{NotSimulated.__name__}: {told}"
    found[rank] = replace(found[rank], ending=Ending.RAISED, message=refused, at_s=-1.0, payload=b"")
    return tuple(found)


def _refuse_profiler() -> NoReturn:
    raise NotSimulated("torch.profiler of two ranks at once")


def _adversary(order: RunOrder, history: History | None) -> Adversary:
    if isinstance(order.manner.interleaving, Guide):
        assert history is not None, "who follows a guide counts events"
        return Guided(order.manner.interleaving, history)
    return Fair(order.manner.interleaving, order.ranks)


@dataclass(frozen=True)
class _WaitingRank:
    """Where a rank is that has not ended: its stack, the user's own line, and what it waits for, from whom."""

    waiting: str | None = None
    peers: tuple[int, ...] | None = None
    stack: str = ""
    line: str = ""
    progress: str = ""

    @staticmethod
    def of(seat: Seat, note: str | None, done: str) -> "_WaitingRank":
        """``note``: what its runtime says that it waits for; ``done``: how far it has come."""
        frame = seat.frame
        if frame is None:
            return _WaitingRank()
        frames, own = traceback.extract_stack(frame), stack_of(frame)
        stack = stack_text([one for one in frames if not _is_ours(one.filename)])
        line = f" at {Path(own[0].file).name}:{own[0].number}" if own else ""
        wait = None if seat.wait is None else seat.wait()
        if wait is None:
            return _WaitingRank(stack=stack, line=line)
        return _WaitingRank(note or wait.text, wait.peers, stack, line, done)

    def report(self, rank: int, ending: Ending, message: str) -> RankReport:
        """How the rank's part ended here."""
        return RankReport(rank, ending, message, self.stack, self.waiting, peers=self.peers, progress=self.progress)


def _is_ours(file: str) -> bool:
    """Whether it is of this world, or of what calls its ``Reads``: no news for who looks for a line of theirs."""
    return Path(file).parent == Path(__file__).parent or Path(file).parts[-2:] == ("torch", "overrides.py")
