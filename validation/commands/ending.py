"""How a command ends: its exit status, and on standard error the one sentence that says why there is no result."""

import atexit
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType, MappingProxyType
from typing import NoReturn, Self

from pipeproof.pipeline.laws import LawBroken
from pipeproof.worlds.launcher import reports
from pipeproof.worlds.rank_report import NeedsMoreRanks
from pipeproof.worlds.standard_output import ReaderGone, discard, standard_output
from pipeproof.worlds.timeout import END_S, LOOK_S

WRONG, BAD_INPUT, NO_VERDICT = 1, 2, 3
UNREAD = 128 + signal.SIGPIPE  # what a shell sees of any program whose reader stops: no verdict, and no complaint
_REQUESTS: Mapping[int, str] = MappingProxyType(
    {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "terminated"}
)
_UNASKED = (signal.SIG_DFL, signal.default_int_handler)


class AskedToEnd(BaseException):
    """A signal asked the process to end. Like KeyboardInterrupt nothing on the way may take it for an error.

    KeyboardInterrupt itself would not do: where one passes through ``exec``, CPython 3.11 ends by the signal in the
    end, whatever status was chosen.
    """

    def __init__(self, number: int) -> None:
        super().__init__(_REQUESTS[number])
        self.number = number

    @property
    def status(self) -> int:
        """What a shell sees of a process that such a signal ended."""
        return 128 + self.number


class Asked:
    """A block that a request to end ends alone: results so far are still reported.

    ``request``: what asked. Raise it after the report.
    """

    def __init__(self) -> None:
        self.request: AskedToEnd | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, AskedToEnd):
            self.request = error
        return self.request is not None


def leave(status: int) -> NoReturn:
    """End the process with ``status``; by the signal itself where one asked, so that a shell's loop ends as well."""
    if status - 128 in _REQUESTS:
        atexit._run_exitfuncs()  # which a signal would leave out
        signal.signal(status - 128, signal.SIG_DFL)
        os.kill(os.getpid(), status - 128)
    sys.exit(status)


def run_command(command: Callable[[], int]) -> int:
    """Run ``command``; its exit status, or that of what ended it, which is said."""
    try:
        with standard_output(), _heeding_signals():
            try:
                status = command()
            except LawBroken as error:  # an answer, not a complaint
                sys.stdout.write(f"{error}\n")
                status = WRONG
    except ReaderGone:
        return int(UNREAD)
    except ValueError as error:  # every error of ours about input or output is one
        status = _say(str(error), BAD_INPUT)
    except NeedsMoreRanks as error:
        more = "start more ranks, or ask for fewer with --ranks or --max-ranks"
        status = _say(f"{error}; {more}", BAD_INPUT)
    except AskedToEnd as request:
        status = _say(str(request), request.status)
    except KeyboardInterrupt:
        status = _say("interrupted", 128 + signal.SIGINT)
    except Exception as error:  # ours to mend, and never to be taken for a wrong answer
        ours = f"pipeproof: a fault in pipeproof itself: {error!r}; please report it"
        status = _say(f"{traceback.format_exc()}{ours}", NO_VERDICT)
    if status and not reports():
        # A launcher ends all ranks as soon as one ends badly; rank 0 is the one that says why.
        time.sleep(END_S)
    return status


def _say(message: str, status: int) -> int:
    if reports() and sys.stderr is not None:
        try:
            sys.stderr.write(f"pipeproof: {message}\n")
            sys.stderr.flush()
        except OSError:  # there is nowhere else to say it
            discard(sys.stderr)
    return status


@contextmanager
def _heeding_signals() -> Iterator[None]:
    """Let signals that would end the process at once end the block first, so that nothing is left behind.

    A request to end that fell where nothing can be raised (a collector's callback) is repeated.
    """
    before = {number: signal.getsignal(number) for number in _REQUESTS}
    ours = {number: handler for number, handler in before.items() if handler in _UNASKED}
    if threading.current_thread() is not threading.main_thread():
        ours = {}  # Python would not hear of it
    hook = sys.unraisablehook

    def insist(unraisable: "sys.UnraisableHookArgs") -> None:
        request = unraisable.exc_value
        if not isinstance(request, AskedToEnd):
            hook(unraisable)
            return
        signal.signal(request.number, _ask)
        again = threading.Timer(LOOK_S, os.kill, (os.getpid(), request.number))
        again.daemon = True
        again.start()

    sys.unraisablehook = insist
    for number in ours:
        signal.signal(number, _ask)
    try:
        yield
    finally:
        for number, handler in ours.items():
            signal.signal(number, handler)
        sys.unraisablehook = hook


def _ask(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # once is enough: what was started is ended within a bound
    raise AskedToEnd(number)
