"""Ranks as local processes: one worker pool per rank count, created on demand."""

import contextlib
import os
import shutil
import signal
import socket
import struct
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from pipeproof.pipeline.waiting import DEFAULT_TIMEOUT_S
from pipeproof.worlds.accelerator import CPU
from pipeproof.worlds.at_terminal import debugging
from pipeproof.worlds.launcher import CONTEXT, Seat, fork_server, loopback
from pipeproof.worlds.rank_report import Ending, RankReport
from pipeproof.worlds.shipping import unpack
from pipeproof.worlds.timeout import ANSWER_S, END_S, GRACE_S, LOOK_S
from pipeproof.worlds.worker import serve

_LAST_LINES = 20


class WorkerHandle:
    """Starts a seat's worker and talks to it. All waits are bounded."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self._orders, orders = _channel()
        self._questions, questions = _channel()
        self._process = CONTEXT.Process(
            target=serve,
            args=(orders, questions, seat, seat.full_environment()),
            daemon=True,
            name=f"rank {seat.rank} of {seat.ranks}",
        )
        with orders, questions, fork_server():
            self._process.start()
        assert self._process.pid is not None, "a process that has been started has an id"
        self.pid: int = self._process.pid
        self.handles: frozenset[Connection | int] = frozenset({self._orders, self._process.sentinel})

    def order(self, order: bytes) -> None:
        """Send an order. ``answer`` detects dead workers."""
        with contextlib.suppress(OSError):
            self._orders.send_bytes(order)

    def answer(self) -> RankReport:
        """Return the answer, or the death report; call after one of ``handles`` is ready."""
        with contextlib.suppress(EOFError, OSError):
            if self._orders.poll():
                answer = unpack(self._orders.recv_bytes())
                assert isinstance(answer, RankReport), f"a worker sends reports, not {type(answer)}"
                return answer
        self._process.join(ANSWER_S)
        words = _text(self.seat.output).splitlines(keepends=True)[-_LAST_LINES:]
        last, status = "".join([*words, _text(self.seat.stacks)]), self._process.exitcode
        death = "broke off its connection" if status is None else f"exited with status {status}"
        if status is not None and status < 0:
            death = f"was killed by {signal.Signals(-status).name}"
        return RankReport(self.seat.rank, Ending.DIED, death, last, at_s=time.time())

    def ask(self) -> None:
        """Request position and wait; read the reply by ``testimony``."""
        with contextlib.suppress(OSError):
            self._questions.send_bytes(b"?")

    def testimony(self, deadline_s: float) -> RankReport:
        """Return the rank's position, wait, peers, and progress.

        Uses its reply before the deadline (``time.monotonic``), or else outside observation.
        """
        with contextlib.suppress(EOFError, OSError):
            if self._questions.poll(max(0.0, deadline_s - time.monotonic())):
                reply: RankReport = unpack(self._questions.recv_bytes())
                return replace(reply, rank=self.seat.rank)
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGUSR1)  # the handler in C needs no interpreter lock
            time.sleep(GRACE_S)
        observed = f"busy in native code\n{_text(self.seat.stacks)}"
        return RankReport(self.seat.rank, Ending.STOPPED, traceback=observed)

    def kill(self) -> None:
        """Kill the process; ``bury`` cleans up."""
        self._process.kill()

    def bury(self, deadline_s: float) -> None:
        """Wait for the killed process until the deadline (``time.monotonic``), and release its resources."""
        self._process.join(max(0.0, deadline_s - time.monotonic()))
        self._orders.close()
        self._questions.close()
        with contextlib.suppress(ValueError):  # still in the kernel: nothing more can be done
            self._process.close()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:  # it ended before setup, or prints openly
        return ""


def _channel() -> tuple[Connection, Connection]:
    # A worker may stop in the middle of a message, so this end bounds each read and write.
    ours, theirs = CONTEXT.Pipe()
    with socket.socket(fileno=os.dup(ours.fileno())) as options:
        bound = struct.pack("ll", int(DEFAULT_TIMEOUT_S), 0)
        options.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
        options.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
    return ours, theirs


class Processes:
    """A place with local processes for ranks, reused until one fails.

    Also replaced once jobs leave more than ``most_groups`` process groups.
    """

    def __init__(self, device: str, *, silent: bool = False, most_groups: int | None = None) -> None:
        self._device = device
        self._silent = silent
        self._most_groups = most_groups
        self._pools: dict[int, Pool] = {}

    def run(
        self, order: bytes, *, label: str, ranks: int, timeout_s: float, meanwhile: Iterable[object]
    ) -> Sequence[RankReport]:
        """Return one answer per rank, in rank order. With a single controller, the label needs no agreement."""
        del label
        pool = self._pools.get(ranks)
        if pool is None or not pool.alive:
            folder = tempfile.mkdtemp(prefix="pipeproof-")
            here = self._device, f"file://{folder}/store", folder, loopback()
            seats = [Seat(rank, ranks, rank, ranks, *here, silent=self._silent) for rank in range(ranks)]
            pool = self._pools[ranks] = Pool(seats)
        # Device memory belongs to busy ranks alone.
        answers = pool.run(order, timeout_s=timeout_s, meanwhile=meanwhile if self._device == CPU else ())
        if self._most_groups is not None and max(answer.groups for answer in answers) > self._most_groups:
            pool.close()
        return answers

    def close(self) -> None:
        """End all workers."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


_NOTHING = object()  # marks exhausted caller work


class Pool:
    """One worker per seat with a common life: after a failure all end, since none is trustworthy.

    The seats share a folder, removed with the pool.
    """

    def __init__(self, seats: Sequence[Seat]) -> None:
        self._workers: list[WorkerHandle] = []
        # Finalizers also run at interpreter exit, before multiprocessing's unbounded cleanup.
        self._end = weakref.finalize(self, _end, self._workers, seats[0].folder)
        self._ready = False
        self._debugging = debugging(seats[0].folder)
        for seat in seats:
            self._workers.append(WorkerHandle(seat))

    @property
    def alive(self) -> bool:
        """True if this pool can run another job."""
        return self._end.alive

    def close(self) -> None:
        """End the workers within a bound, whatever they do. Repeated calls do nothing."""
        self._end()

    def run(
        self,
        order: bytes,
        *,
        timeout_s: float,
        cancelled: Callable[[], bool] | None = None,
        meanwhile: Iterable[object] = (),
    ) -> list[RankReport]:
        """Return all workers' answers, in seat order.

        Closes the pool after a failure, or if a worker left its group. The bound, in seconds, starts when all workers
        are ready. cancelled: polled for failures outside this pool. meanwhile: as in ``World.run``.
        """
        try:
            answers = [] if self._ready else self._collect("join its group", DEFAULT_TIMEOUT_S, cancelled)
            self._ready = True
            if not any(answer.failed for answer in answers):
                self._debugging.unlink(missing_ok=True)
                for worker in self._workers:
                    worker.order(order)
                answers = self._collect("finish", timeout_s, cancelled, meanwhile)
        except BaseException:
            self.close()
            raise
        if any(answer.failed or answer.left for answer in answers):
            self.close()
        return answers

    def _collect(
        self, aim: str, bound_s: float, cancelled: Callable[[], bool] | None, meanwhile: Iterable[object] = ()
    ) -> list[RankReport]:
        answers: dict[WorkerHandle, RankReport] = {}
        pending, own = list(self._workers), iter(meanwhile)
        deadline_s, failing = time.monotonic() + bound_s, False
        while pending:
            busy = not failing and next(own, _NOTHING) is not _NOTHING
            left_s = max(0.0, deadline_s - time.monotonic())
            patience_s = 0.0 if busy else left_s if cancelled is None else min(left_s, LOOK_S)
            ready = wait([handle for worker in pending for handle in worker.handles], patience_s)
            if not ready and not left_s and not failing and self._debugging.exists():
                deadline_s = time.monotonic() + bound_s  # a debugger is active and needs no bound
            elif not ready and not left_s:
                break  # no sooner: answers that came during own work were in time
            graces_s = [GRACE_S] if cancelled is not None and not failing and cancelled() else []
            for worker in [worker for worker in pending if not worker.handles.isdisjoint(ready)]:
                pending.remove(worker)
                answers[worker] = worker.answer()
                if answers[worker].failed:
                    skipped = answers[worker].ending is Ending.SKIPPED
                    graces_s.append(END_S if skipped else GRACE_S)  # if others skip too, it is no failure
            if graces_s:
                failing = True
                deadline_s = min(deadline_s, time.monotonic() + min(graces_s))
        for worker in pending:
            worker.ask()
        deadline_s = time.monotonic() + ANSWER_S
        ending, complaint = Ending.STUCK, f"did not {aim} within {bound_s:g} s"
        if failing:
            ending, complaint = Ending.STOPPED, ""
        for worker in pending:
            where = worker.testimony(deadline_s)
            answers[worker] = replace(where, ending=ending, message=complaint, at_s=time.time())
        return [answers[worker] for worker in self._workers]


def _end(workers: Sequence[WorkerHandle], folder: str) -> None:
    for worker in workers:
        worker.kill()
    deadline_s = time.monotonic() + END_S
    for worker in workers:
        worker.bury(deadline_s)
    shutil.rmtree(folder, ignore_errors=True)
