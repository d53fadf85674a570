"""How a command ends: its exit status, and on standard error the one sentence that says why there is no result."""

import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from pipeline.laws import LawBroken
from validation.launcher import reports
from validation.standard_output import ReaderGone, standard_output

WRONG, BAD_INPUT, NO_VERDICT = 1, 2, 3
UNREAD = 128 + signal.SIGPIPE  # what a shell sees of any program whose reader stops: no verdict, and no complaint
_LAST_WORDS_S = 10.0


class Terminated(BaseException):
    """The process was asked to end: like KeyboardInterrupt nothing on the way may take it for an error."""


def ended(command: Callable[[], int]) -> int:
    """Run ``command``; its exit status, or that of what ended it, which is said."""
    status = _status(command)
    if status not in (0, UNREAD) and not reports():
        # A launcher ends all ranks as soon as one ends badly; rank 0 is the one that says why.
        time.sleep(_LAST_WORDS_S)
    return status


def _status(command: Callable[[], int]) -> int:
    try:
        with standard_output(), _heeding_signals():
            return _judged(command)
    except ReaderGone:
        return int(UNREAD)
    except ValueError as error:  # every error of ours about input or output is one
        return _say(str(error), BAD_INPUT)
    except KeyboardInterrupt:
        return _say("interrupted", NO_VERDICT)
    except Terminated:
        return _say("terminated", NO_VERDICT)
    except Exception as error:  # ours to mend, and never to be taken for a wrong answer
        return _say(
            f"{traceback.format_exc()}pipeproof: a fault in pipeproof itself: {error!r}; please report it", NO_VERDICT
        )


def _judged(command: Callable[[], int]) -> int:
    try:
        return command()
    except LawBroken as error:  # an answer, not a complaint
        sys.stdout.write(f"{error}\n")
        return WRONG


def _say(message: str, status: int) -> int:
    if reports() and sys.stderr is not None:
        with suppress(OSError):  # there is nowhere else to say it
            sys.stderr.write(f"pipeproof: {message}\n")
    return status


@contextmanager
def _heeding_signals() -> Iterator[None]:
    """Let signals that would end the process at once end the block first, so that nothing is left behind."""
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        ours = []  # Python would not hear of it
    for number in ours:
        signal.signal(number, _terminate)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(number, signal.SIG_IGN)  # once is enough: what was started is ended within a bound
    raise Terminated
