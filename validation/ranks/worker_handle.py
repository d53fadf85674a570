"""One worker from its controller's side: a process, a channel for orders, and a channel for questions."""

import contextlib
import multiprocessing
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from types import ModuleType

from validation.ranks.rank_report import Ending, RankReport
from validation.ranks.seat import Seat
from validation.ranks.shipping import unpack
from validation.ranks.worker import Answer, serve

_STALL_BOUND_S = 60  # for one message to move at all
_EXIT_BOUND_S = 1.0  # for a process whose connection is closed to be seen dead
_SIGNAL_BOUND_S = 0.3  # for a signal handler to write a stack

_CONTEXT = multiprocessing.get_context("forkserver")


class WorkerHandle:
    """Starts the worker of a seat and speaks with it. No method waits without a bound."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self._orders, orders = _channel()
        self._questions, questions = _channel()
        self._process = _CONTEXT.Process(
            target=serve,
            args=(orders, questions, seat, seat.full_environment()),
            daemon=True,
            name=f"rank {seat.rank} of {seat.ranks}",
        )
        with orders, questions, _starting():
            self._process.start()
        assert self._process.pid is not None, "a process that has been started has an id"
        self.pid: int = self._process.pid
        self.handles: frozenset[Connection | int] = frozenset({self._orders, self._process.sentinel})

    def order(self, order: bytes) -> None:
        """Hand over one order. A worker that is gone is found out by ``answer``."""
        with contextlib.suppress(OSError):
            self._orders.send_bytes(order)

    def answer(self) -> Answer:
        """Its answer, or how it died; to be called once one of ``handles`` is ready."""
        with contextlib.suppress(EOFError, OSError):
            if self._orders.poll():
                answer = unpack(self._orders.recv_bytes())
                assert isinstance(answer, Answer), f"a worker sends answers, not {type(answer)}"
                return answer
        self._process.join(_EXIT_BOUND_S)
        report = RankReport(self.seat.rank, Ending.DIED, self._death(), self._signal_stack(), at_s=time.time())
        return Answer(report)

    def ask(self) -> None:
        """Ask where it is and what it waits for; ``testimony`` has the reply."""
        with contextlib.suppress(OSError):
            self._questions.send_bytes(b"?")

    def testimony(self, deadline_s: float) -> tuple[str, str | None]:
        """Its stack and what it waits for, told before the deadline (of ``time.monotonic``) or else as can be seen."""
        with contextlib.suppress(EOFError, OSError):
            if self._questions.poll(max(0.0, deadline_s - time.monotonic())):
                stack, waiting = unpack(self._questions.recv_bytes())
                return stack, waiting
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGUSR1)  # the handler in C needs no interpreter lock
            time.sleep(_SIGNAL_BOUND_S)
        return f"busy in native code\n{self._signal_stack()}", None

    def kill(self) -> None:
        """End the process at once; ``bury`` sees to the rest."""
        self._process.kill()

    def bury(self, deadline_s: float) -> None:
        """Wait for the killed process until the deadline (of ``time.monotonic``), and let go of what belonged to it."""
        self._process.join(max(0.0, deadline_s - time.monotonic()))
        self._orders.close()
        self._questions.close()
        with contextlib.suppress(ValueError):  # not dead yet: the kernel holds it, and nothing more can be done
            self._process.close()

    def _death(self) -> str:
        status = self._process.exitcode
        if status is None:
            return "broke off its connection"
        return f"exited with status {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"

    def _signal_stack(self) -> str:
        try:
            return self.seat.stacks.read_text(errors="replace")
        except FileNotFoundError:  # it ended before it had settled
            return ""


def _channel() -> tuple[Connection, Connection]:
    # A worker can be stopped in the middle of a message, so this end never waits long for a single read or write.
    ours, theirs = _CONTEXT.Pipe()
    with socket.socket(fileno=os.dup(ours.fileno())) as options:
        bound = struct.pack("ll", _STALL_BOUND_S, 0)
        options.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
        options.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
    return ours, theirs


@contextlib.contextmanager
def _starting() -> Iterator[None]:
    """The conditions under which a worker is started, and with the first one the fork server.

    The caller's script is out of sight: jobs travel by value, so a worker need not run the script again, which would
    cost an import of pytest or trap a script without a ``__main__`` guard. One thread: ranks share the machine.
    """
    names = ["validation.ranks.preload", *(["pytest"] if "pytest" in sys.modules else [])]
    _CONTEXT.set_forkserver_preload(names)
    script, threads = sys.modules["__main__"], os.environ.get("OMP_NUM_THREADS")
    sys.modules["__main__"] = ModuleType("__main__")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        _start_server()
        yield
    finally:
        sys.modules["__main__"] = script
        if threads is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = threads


def _start_server() -> None:
    """Start the fork server where there is none, with Ctrl-C kept from it: that is for this process to decide on."""
    resource_tracker.ensure_running()  # the server starts it too, and would then undo the mask
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
