"""A whole run in this process: every rank's part of a job, and how each ended."""

import gc
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from pipeproof.core.observe.per_rank_globals import share_process
from pipeproof.core.observe.posted_messages import progress
from pipeproof.core.observe.stack import stack_of
from pipeproof.pipeline.transports import RULES
from pipeproof.pipeline.waiting import current
from pipeproof.wings.simulated.collectives import Net
from pipeproof.wings.simulated.engine.clock import Clock, goes_by, virtual_time
from pipeproof.wings.simulated.engine.decisions import Guide, Guided, fair
from pipeproof.wings.simulated.engine.events import History
from pipeproof.wings.simulated.engine.exploration import Course
from pipeproof.wings.simulated.engine.scheduler import WHOLE, NotSimulated, Scheduler, Seat, wait_for_end
from pipeproof.wings.simulated.engine.simulation import Simulation, Timing
from pipeproof.wings.simulated.group import GROUPS, Bare, messages
from pipeproof.wings.simulated.own_state import OwnModules, OwnState, attributes
from pipeproof.wings.simulated.store import SharedStore
from pipeproof.wings.simulated.torch_inside import (
    one_profiler,
    standing_in,
    unwatch,
)
from pipeproof.wings.simulated.work import Uses
from pipeproof.worlds.launcher import place_of
from pipeproof.worlds.rank_report import Ending, RankReport
from pipeproof.worlds.shipping import unpack_job
from pipeproof.worlds.timeout import END_S
from pipeproof.worlds.worker import RankContext, attempt, obey, stack_text

_STUCK = "can never go on"


@dataclass(frozen=True)
class RunOrder:
    """What to run: a packed job, on so many ranks, and what decides the run.

    ``timeout_s`` bounds, in seconds of the clock, what does not move on: a loop, a lock. What does may take ``WHOLE``
    times as long, and no longer. ``own_modules``: packages that each rank imports anew. ``noted``: keep the course.
    """

    job: bytes
    ranks: int
    timeout_s: float
    decision: Simulation
    timing: Timing
    own_modules: tuple[str, ...]
    noted: bool


@dataclass(frozen=True)
class Played:
    """Every rank's report. ``sound``: no rank's thread is left, so this process can run again.

    ``course``: what happened, where that is noted. ``in_time``: no rank was out of the network when the bound came.
    ``may_end``: it is a hang, in which a device would wait in a program's place while another waits for no device.
    """

    reports: Sequence[RankReport]
    sound: bool
    course: Course | None = None
    in_time: bool = True
    may_end: bool = False


def play(context: Any, order: RunOrder) -> Played:
    """Run ``order``; a job for a separate process. Restores the process afterwards."""
    del context
    before = attributes() if order.own_modules else {}
    with share_process(), virtual_time():
        with suppress(Exception):  # each rank meets and reports it again
            unpack_job(order.job)  # imports come before the snapshot of state
        modules = OwnModules(order.own_modules, before)
        own = OwnState(modules)
        try:
            return _SimulatedRun(order, modules).play()
        finally:
            own.take()
            Net.current = None
            if order.own_modules:
                gc.collect()  # what ends with an engine may import, and must not do so amid the next run's imports


class _SimulatedRun:
    """A run, first turn to last."""

    def __init__(self, order: RunOrder, modules: OwnModules) -> None:
        self._order, self._modules = order, modules
        self._reports: dict[int, RankReport] = {}  # of ranks that have ended, or can never go on
        self._may_end = False
        self._seats = []
        for rank in range(order.ranks):
            thread = Thread(target=self._run_rank, args=(rank,), name=f"rank {rank} of {order.ranks}", daemon=True)
            self._seats.append(Seat(rank, OwnState(modules), Clock(order.timing), thread))
        by, rules = order.decision.first, RULES[order.decision.transport]
        self._history = History(kept=order.noted or isinstance(by, Guide))
        self._guided = Guided(Guide() if isinstance(by, int) else by, self._history)
        choose = fair(by, order.ranks) if isinstance(by, int) else self._guided.choose
        stuck = unwatch(self._note_stuck)
        self._scheduler = Scheduler(self._seats, choose, stuck=stuck, history=self._history)
        room = 0 if rules.by_name else order.decision.room
        self._network = Net(self._scheduler, rules, latency_s=order.timing.latency_s, room=room)
        self._store = SharedStore(self._scheduler)
        Net.current = self._network

    def play(self) -> Played:
        NotSimulated.refusals.clear()
        order = self._order
        with ExitStack() as opened:
            opened.enter_context(standing_in(GROUPS, Bare, messages(), batch=self._network.batch))
            opened.enter_context(one_profiler())
            for seat in self._seats:
                seat.state = OwnState.fresh(seat.rank, self._modules)
                seat.thread.start()
            self._scheduler.begin()
            held = wait_for_end(self._scheduler, timeout_s=order.timeout_s, whole_s=WHOLE * order.timeout_s)
            if held and self._scheduler.over:
                return Played(self._conclude(), sound=False, in_time=False)
            if held:  # one rank, whose state is out of reach, goes on
                self._reports |= {one.rank: _report(one, None, "") for one in self._seats if not one.ended}
                return Played(self._conclude(held), sound=False, in_time=False)
            for seat in self._seats:
                seat.thread.join(END_S)
        sound = not any(seat.thread.is_alive() for seat in self._seats)
        course, by = None, self._guided
        if order.noted:
            course = Course(self._history.events[: by.redundant], by.redundant is not None, by.astray)
        return Played(self._conclude(), sound, course, may_end=self._may_end)

    def _run_rank(self, rank: int) -> None:
        """Wait for the first turn, do a rank's part, and hand the turn on for good: in the rank's thread."""
        scheduler = self._scheduler
        goes_by(self._seats[rank].clock, scheduler.pause)
        scheduler.await_turn(rank)
        try:
            with torch.autograd.set_multithreading_enabled(False):  # backward runs in its rank's thread
                report = attempt(rank, partial(self._take_part, rank))
        finally:
            if not scheduler.over:
                number = sum(seat.ended for seat in self._seats)
                self._reports[rank] = replace(report, at_s=float(number))  # in the order of this run
            scheduler.finish()

    def _take_part(self, rank: int) -> object:
        __tracebackhide__ = True
        network, ranks = self._network, self._order.ranks
        os.environ.update(place_of(rank, ranks, rank, ranks))
        dist.init_process_group(network.rules.backend, store=self._store, rank=rank, world_size=ranks)
        group = dist.group.WORLD
        assert group is not None, "init_process_group returned without a default group"
        self._history.joins(rank)
        with Uses(network.works, rank):
            try:
                result = obey(self._order.job, RankContext(rank, ranks, "cpu", group))
                self._modules.check()
            except Exception:
                self._scheduler.tell_again()
                raise
            network.leave(rank)
        return result

    def _note_stuck(self) -> None:
        """Record every rank's position and wait before they give up. No rank is running."""
        waiting = [seat for seat in self._seats if seat.wait is not None]
        self._may_end = any(one.for_device for one in waiting) and not all(one.by_device for one in waiting)
        for seat in self._seats:
            if not seat.ended:
                seat.state.take()  # with its own state it describes itself like a real rank
                self._reports[seat.rank] = _report(seat, current(), progress())
        self._seats[self._scheduler.running].state.take()

    def _conclude(self, held: str = "") -> Sequence[RankReport]:
        """Report how each rank ended. ``held``: the message about a rank that keeps the turn; the others stopped.

        If a feature was refused, and perhaps caught, the refusal is what became of the run.
        """
        threads = [seat.thread for seat in self._seats]
        reports = [self._reports.get(rank, RankReport(rank, Ending.STUCK, _STUCK)) for rank in range(self._order.ranks)]
        failed = any(one.failed and one.ending is not Ending.STUCK for one in reports)
        for rank, one in enumerate(reports):
            if one.ending is Ending.STUCK and (held or failed):
                keeps = held and rank == self._scheduler.running
                ending, said = (one.ending, held) if keeps else (Ending.STOPPED, "")
                reports[rank] = replace(one, ending=ending, message=said)
        if NotSimulated.refusals and not any(NotSimulated.__name__ in one.message for one in reports):
            thread, refusal = NotSimulated.refusals[0]
            rank = threads.index(thread) if thread in threads else 0
            reports = [replace(one, ending=Ending.STOPPED) if one.ending is Ending.STUCK else one for one in reports]
            said = f"{NotSimulated.__name__}: {refusal}"
            reports[rank] = replace(reports[rank], ending=Ending.RAISED, message=said, at_s=-1.0, payload=b"")
        return reports


def _report(seat: Seat, note: str | None, done: str) -> RankReport:
    """Report the position of an unfinished rank: its stack, the user's line, its wait, and for whom.

    ``note``: its runtime's note about the wait. ``done``: its progress.
    """
    report = RankReport(seat.rank, Ending.STUCK, _STUCK)
    if (frame := sys._current_frames().get(seat.thread.ident or 0)) is None:
        return report
    frames, own = traceback.extract_stack(frame), stack_of(frame)
    line = f" at {Path(own[0].file).name}:{own[0].number}" if own else ""
    theirs = [one for one in frames if Path(__file__).parent not in Path(one.filename).parents]
    stack = stack_text([one for one in theirs if Path(one.filename).parts[-2:] != ("torch", "overrides.py")])
    report = replace(report, message=report.message + line, traceback=stack)
    if seat.wait is None:
        return report
    wait = seat.wait()
    return replace(report, waiting=note or wait.text, peers=wait.peers, progress=done)
