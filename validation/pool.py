"""Workers from their controller's side: started, given orders, watched, and ended when one of them fails."""

import contextlib
import functools
import multiprocessing
import os
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from types import ModuleType

from validation.rank_report import Outcome, RankReport
from validation.shipping import pack, unpack
from validation.worker import Answer, Seat, serve

START_BOUND_S = 120.0  # importing torch and meeting the other ranks, on a busy machine
GRACE_S = 0.5  # after the first failure, for the others to fail by themselves
SKIP_GRACE_S = 3.0  # after the first skip, for the others to skip too: then it is no failure
_STALL_BOUND_S = 60.0  # for one message to move at all
_QUESTION_BOUND_S = 1.0
_SIGNAL_BOUND_S = 0.3
_END_BOUND_S = 10.0
_LOOK_S = 0.05  # how often to look whether the run has failed elsewhere

_CONTEXT = multiprocessing.get_context("forkserver")


class Pool:
    """One worker for each seat, with the same life: when one fails, all are ended, as none could be trusted."""

    def __init__(self, seats: Sequence[Seat]) -> None:
        self._folder = tempfile.mkdtemp(prefix="pipeproof-")
        self._workers: list[_Worker] = []
        # Also runs when the interpreter ends: before multiprocessing's own exit, which waits without a bound.
        self._end = weakref.finalize(self, _end, self._workers, self._folder)
        self._ready = False
        for seat in seats:
            self._workers.append(_Worker(replace(seat, folder=self._folder)))

    @property
    def alive(self) -> bool:
        """Whether this pool can run another job."""
        return self._end.alive

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers, in the order of the seats."""
        return [worker.pid for worker in self._workers]

    def close(self) -> None:
        """End the workers, whatever they do. Takes a bounded time; closing twice does nothing."""
        self._end()

    def run(
        self, order: bytes, *, timeout_s: float, cancelled: Callable[[], bool] | None = None
    ) -> dict[int, Answer]:
        """Give every worker the order; their answers by rank. If one of them failed, the pool is closed.

        The bound counts from when all workers are ready. ``cancelled`` is asked now and then whether a rank of the
        same run has failed that is not in this pool.
        """
        try:
            answers = self._ready_answers(cancelled)
            if not any(answer.failed for answer in answers.values()):
                for worker in self._workers:
                    worker.order(order)
                answers = self._collect(timeout_s, cancelled)
        except BaseException:
            self.close()
            raise
        if any(answer.failed for answer in answers.values()):
            self.close()
        return answers

    def _ready_answers(self, cancelled: Callable[[], bool] | None) -> dict[int, Answer]:
        if self._ready:
            return {}
        self._ready = True
        return self._collect(START_BOUND_S, cancelled)

    def _collect(self, bound_s: float, cancelled: Callable[[], bool] | None) -> dict[int, Answer]:
        answers: dict[int, Answer] = {}
        pending = list(self._workers)
        deadline = time.monotonic() + bound_s
        failing = False
        while pending and (left_s := deadline - time.monotonic()) > 0:
            watched = [handle for worker in pending for handle in worker.handles]
            ready = wait(watched, left_s if cancelled is None else min(left_s, _LOOK_S))
            for worker in [worker for worker in pending if not worker.handles.isdisjoint(ready)]:
                pending.remove(worker)
                answers[worker.seat.rank] = answer = worker.answer()
                if answer.failed:
                    failing = True
                    deadline = min(deadline, time.monotonic() + _grace_s(answer))
            if not failing and cancelled is not None and cancelled():
                failing = True
                deadline = min(deadline, time.monotonic() + GRACE_S)
        outcome, message = (Outcome.STOPPED, "") if failing else (Outcome.STUCK, f"did not finish within {bound_s:g} s")
        return answers | _examine(pending, outcome, message)


class _Worker:
    """The controller's end of one worker."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self._orders, orders = _channel()
        self._questions, questions = _channel()
        self._process = _CONTEXT.Process(
            target=serve, args=(orders, questions, seat), daemon=True, name=f"rank {seat.rank} of {seat.ranks}"
        )
        with orders, questions, _starting():
            self._process.start()
        self.handles: Collection[Connection | int] = frozenset({self._orders, self._process.sentinel})
