"""One worker from its controller's side: a process, a channel for orders, and a channel for questions."""

import contextlib
import os
import signal
import socket
import struct
import time
from multiprocessing.connection import Connection

from validation.worlds.launcher import CONTEXT, Seat, fork_server
from validation.worlds.rank_report import Ending, RankReport
from validation.worlds.shipping import unpack
from validation.worlds.worker import Answer, serve

_STALL_BOUND_S = 60  # for one message to move at all
_EXIT_BOUND_S = 1.0  # for a process whose connection is closed to be seen dead
_SIGNAL_BOUND_S = 0.3  # for a signal handler to write a stack


class WorkerHandle:
    """Starts the worker of a seat and speaks with it. No method waits without a bound."""

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

    def testimony(self, deadline_s: float) -> tuple[str, str | None, tuple[int, ...] | None]:
        """Its stack, what it waits for and from which ranks.

        Told before the deadline (of ``time.monotonic``), or else as can be seen.
        """
        with contextlib.suppress(EOFError, OSError):
            if self._questions.poll(max(0.0, deadline_s - time.monotonic())):
                stack, waiting, peers = unpack(self._questions.recv_bytes())
                return stack, waiting, peers
        with contextlib.suppress(OSError):
            os.kill(self.pid, signal.SIGUSR1)  # the handler in C needs no interpreter lock
            time.sleep(_SIGNAL_BOUND_S)
        return f"busy in native code\n{self._signal_stack()}", None, None

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
    ours, theirs = CONTEXT.Pipe()
    with socket.socket(fileno=os.dup(ours.fileno())) as options:
        bound = struct.pack("ll", _STALL_BOUND_S, 0)
        options.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, bound)
        options.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, bound)
    return ours, theirs
