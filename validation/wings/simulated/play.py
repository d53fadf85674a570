"""A whole run in this process: every rank's part of a job, and how each ended."""

import gc
import os
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # not in __all__

from pipeproof.core.observe.per_rank_globals import share_process
from pipeproof.core.observe.posted_messages import progress
from pipeproof.core.observe.stack import stack_of
from pipeproof.pipeline.transports import RULES
from pipeproof.pipeline.waiting import current
from pipeproof.wings.simulated.engine.adversaries import Fair
from pipeproof.wings.simulated.engine.clock import Clock, goes_by, virtual_time
from pipeproof.wings.simulated.engine.events import History
from pipeproof.wings.simulated.engine.exploration import Course
from pipeproof.wings.simulated.engine.guide import Guide, Guided
from pipeproof.wings.simulated.engine.scheduler import WHOLE, NotSimulated, Scheduler, Seat, wait_for_end
from pipeproof.wings.simulated.engine.simulation import Manner
from pipeproof.wings.simulated.group import GROUPS, Bare, Net, messages
from pipeproof.wings.simulated.network import Network
from pipeproof.wings.simulated.own_state import OwnModules, OwnState, attributes
from pipeproof.wings.simulated.store import SharedStore
from pipeproof.wings.simulated.torch_inside import (
    disable_autograd_threads,
    join,
    one_profiler,
    standing_in,
    unwatch,
)
from pipeproof.wings.simulated.uses import Uses
from pipeproof.worlds.launcher import place_of
from pipeproof.worlds.rank_report import Ending, RankReport
from pipeproof.worlds.shipping import unpack_job
from pipeproof.worlds.timeout import END_S
from pipeproof.worlds.worker import RankContext, attempt, obey, stack_text


class Rank(Thread):
    """A rank's thread; ``report`` is set at its end, unless it gave up."""

    def __init__(
        self, rank: int, ranks: int, part: Callable[[RankContext], object], store: Store, network: Network
    ) -> None:
        super().__init__(name=f"rank {rank} of {ranks}", daemon=True)
        self.report: RankReport | None = None
        self._rank, self._ranks = rank, ranks
        self._part, self._store, self._network = part, store, network

    def run(self) -> None:
        """Wait for the first turn, do the part, and hand the turn on for good."""
        scheduler = self._network.scheduler
        goes_by(scheduler.seats[self._rank].clock, scheduler.pause)
        scheduler.await_turn(self._rank)
        try:
            with disable_autograd_threads():
                report = attempt(self._rank, self._join)
        finally:
            if not scheduler.over:
                self.report = replace(report, at_s=float(scheduler.ended))  # in the order of this run
            scheduler.finish()

    def _join(self) -> object:
        __tracebackhide__ = True
        os.environ.update(place_of(self._rank, self._ranks, self._rank, self._ranks))
        group = join(self._network.rules.backend, self._rank, self._ranks, self._store)
        self._network.scheduler.history.joins(self._rank)
        with Uses(self._network, self._rank):
            try:
                result = self._part(RankContext(self._rank, self._ranks, "cpu", group))
            except Exception:
                self._network.scheduler.tell_again()
                raise
            self._network.leave(self._rank)
        return result


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
    """Every rank's report. ``sound``: no rank's thread is left, so this process can run again.

    ``course``: what happened, where that is noted. ``in_time``: no rank was out of the network when the bound came.
    ``may_end``: it is a hang, in which a device would wait in a program's place while another waits for no device.
    """

    reports: tuple[RankReport, ...]
    sound: bool
    course: Course | None = None
    in_time: bool = True
    may_end: bool = False


def play(context: Any, order: RunOrder) -> Played:
    """Run ``order``; a job for a separate process. Restores the process afterwards."""
    del context
    before = attributes() if order.manner.own_modules else {}
    with share_process(), virtual_time():
        with suppress(Exception):  # each rank meets and reports it again
            unpack_job(order.job)  # imports come before the snapshot of state
        modules = OwnModules(order.manner.own_modules)
        modules.have_replaced(before)
        own = OwnState.now(modules)
        try:
            return _SimulatedRun(order, modules).play(WHOLE * order.timeout_s)
        finally:
            own.take()
            Net.current = None
            if order.manner.own_modules:
                gc.collect()  # what ends with an engine may import, and must not do so amid the next run's imports


def _check(modules: OwnModules, order: bytes, context: RankContext) -> object:
    """Run a rank's part of a packed job. Raises if it imported modules that must not be shared."""
    __tracebackhide__ = True
    result = obey(order, context)
    modules.check()
    return result


class _SimulatedRun:
    """A run, first turn to last."""

    def __init__(self, order: RunOrder, modules: OwnModules) -> None:
        self._order, self._modules = order, modules
        self._places: dict[int, _WaitingRank] = {}
        self._may_end = False
        self._seats = [Seat(rank, OwnState.now(modules), Clock(order.manner.timing)) for rank in range(order.ranks)]
        self._history = History(kept=order.manner.noted or isinstance(order.manner.interleaving, Guide))
        by = order.manner.interleaving
        self._adversary = Guided(by, self._history) if isinstance(by, Guide) else Fair(by, order.ranks)
        stuck = unwatch(self._note_stuck)
        self._scheduler = Scheduler(self._seats, self._adversary, stuck=stuck, history=self._history)
        self._network = Network(
            self._scheduler,
            RULES[order.manner.transport],
            latency_s=order.manner.timing.latency_s,
            room=0 if RULES[order.manner.transport].by_name else order.manner.room,
        )
        Net.current = Net(self._network)

    def play(self, whole_s: float) -> Played:
        NotSimulated.refusals.clear()
        order, store, network = self._order, SharedStore(self._scheduler), self._network
        with ExitStack() as opened:
            opened.enter_context(standing_in(GROUPS, Bare, messages(), batch=network.batch))
            opened.enter_context(one_profiler())
            job = partial(_check, self._modules, order.job)
            threads = [Rank(rank, order.ranks, job, store, self._network) for rank in range(order.ranks)]
            for seat, thread in zip(self._seats, threads, strict=True):
                seat.state, seat.thread = OwnState.fresh(seat.rank, self._modules), thread
                thread.start()
            self._scheduler.begin()
            if held := wait_for_end(self._scheduler, timeout_s=order.timeout_s, whole_s=whole_s):
                over = self._scheduler.over
                if not over:
                    self._note_late()
                return Played(self._reports("" if over else held), sound=False, in_time=False)
            for thread in threads:
                thread.join(END_S)
        sound = not any(thread.is_alive() for thread in threads)
        return Played(self._reports(), sound, self._course(), may_end=self._may_end)

    def _course(self) -> Course | None:
        if not self._order.manner.noted:
            return None
        events, by = self._history.events, self._adversary
        if not isinstance(by, Guided):
            return Course(events)
        return Course(events[: by.redundant], redundant=by.redundant is not None, astray=by.astray is not None)

    def _note_stuck(self) -> None:
        """Record every rank's position and wait before they give up. No rank is running."""
        waiting = [seat for seat in self._seats if seat.wait is not None]
        self._may_end = any(one.for_device for one in waiting) and not all(one.by_device for one in waiting)
        for seat in self._seats:
            if not seat.ended:
                seat.state.take()  # with its own state it describes itself like a real rank
                self._places[seat.rank] = _WaitingRank.of(seat, current(), progress())
        self._seats[self._scheduler.running].state.take()

    def _note_late(self) -> None:
        """Record the same while one rank, whose state is out of reach, goes on."""
        for seat in self._seats:
            if not seat.ended:
                self._places[seat.rank] = _WaitingRank.of(seat, None, "")

    def _reports(self, held: str = "") -> tuple[RankReport, ...]:
        """Report how each rank ended. ``held``: the message about a rank that keeps the turn; the others stopped."""
        threads = [seat.thread for seat in self._seats if isinstance(seat.thread, Rank)]
        failed = any(one.report is not None and one.report.failed for one in threads)
        reports = []
        for rank, thread in enumerate(threads):
            place = self._places.get(rank, _WaitingRank())
            ended, said = Ending.STUCK, held or f"can never go on{place.line}"
            if (held and rank != self._scheduler.running) or (failed and not held):
                ended, said = Ending.STOPPED, ""
            reports.append(thread.report or place.report(rank, ended, said))
        return _as_refused(reports, threads)


def _as_refused(reports: Sequence[RankReport], threads: Sequence[Rank]) -> tuple[RankReport, ...]:
    """Return ``reports``, or the refusal for all ranks if a feature was refused and perhaps caught."""
    if not NotSimulated.refusals or any(NotSimulated.__name__ in one.message for one in reports):
        return tuple(reports)
    thread, refusal = NotSimulated.refusals[0]
    rank = next((number for number, one in enumerate(threads) if one is thread), 0)
    found = [replace(one, ending=Ending.STOPPED) if one.ending is Ending.STUCK else one for one in reports]
    refused = f"{NotSimulated.__name__}: {refusal}"
    found[rank] = replace(found[rank], ending=Ending.RAISED, message=refused, at_s=-1.0, payload=b"")
    return tuple(found)


@dataclass(frozen=True)
class _WaitingRank:
    """Position of an unfinished rank: its stack, the user's line, its wait, and for whom."""

    waiting: str | None = None
    peers: tuple[int, ...] | None = None
    stack: str = ""
    line: str = ""
    progress: str = ""

    @staticmethod
    def of(seat: Seat, note: str | None, done: str) -> "_WaitingRank":
        """Describe a rank. ``note``: its runtime's note about the wait. ``done``: its progress."""
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
        """Report the rank's end at this position."""
        return RankReport(rank, ending, message, self.stack, self.waiting, peers=self.peers, progress=self.progress)


def _is_ours(file: str) -> bool:
    """True for files of this world or its callers, which tell users nothing."""
    return Path(__file__).parent in Path(file).parents or Path(file).parts[-2:] == ("torch", "overrides.py")
