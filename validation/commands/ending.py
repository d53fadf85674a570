"""How a command ends: its exit status, and on standard error the one sentence that says why there is no result."""

import atexit
import errno
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from types import FrameType, MappingProxyType
from typing import Any, NoReturn, Self, TextIO

from pipeproof.pipeline.laws import LawBroken
from pipeproof.worlds.launcher import reports
from pipeproof.worlds.output_file import OutputError
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
    """A block that a request to end does end, but nothing more: what was found in it can still be told.

    ``request`` is then what asked; who has told all raises it.
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
    status = _status(command)
    if status not in (0, UNREAD) and not reports():
        # A launcher ends all ranks as soon as one ends badly; rank 0 is the one that says why.
        time.sleep(END_S)
    return status


def _status(command: Callable[[], int]) -> int:
    try:
        with standard_output(), _heeding_signals():
            try:
                return command()
            except LawBroken as error:  # an answer, not a complaint
                sys.stdout.write(f"{error}\n")
                return WRONG
    except ReaderGone:
        return int(UNREAD)
    except ValueError as error:  # every error of ours about input or output is one
        return _say(str(error), BAD_INPUT)
    except AskedToEnd as request:
        return _say(str(request), request.status)
    except KeyboardInterrupt:
        return _say("interrupted", 128 + signal.SIGINT)
    except Exception as error:  # ours to mend, and never to be taken for a wrong answer
        return _say(
            f"{traceback.format_exc()}pipeproof: a fault in pipeproof itself: {error!r}; please report it", NO_VERDICT
        )


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
    """Let signals that would end the process at once end the block first, so that nothing is left behind."""
    before = {number: signal.getsignal(number) for number in _REQUESTS}
    ours = {number: handler for number, handler in before.items() if handler in _UNASKED}
    if threading.current_thread() is not threading.main_thread():
        ours = {}  # Python would not hear of it
    hook, sys.unraisablehook = sys.unraisablehook, _insisting(sys.unraisablehook)
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


def _insisting(hook: Callable[["sys.UnraisableHookArgs"], object]) -> Callable[["sys.UnraisableHookArgs"], object]:
    """``hook``, but a request to end that fell where nothing can be raised (a collector's callback) is repeated."""

    def insist(unraisable: "sys.UnraisableHookArgs") -> None:
        request = unraisable.exc_value
        if not isinstance(request, AskedToEnd):
            hook(unraisable)
            return
        signal.signal(request.number, _ask)
        again = threading.Timer(LOOK_S, os.kill, (os.getpid(), request.number))
        again.daemon = True
        again.start()

    return insist


class ReaderGone(Exception):
    """Whoever read standard output has stopped, as ``head`` does."""


@contextmanager
def standard_output() -> Iterator[None]:
    """Raise ``ReaderGone`` or ``OutputError`` where standard output takes no more, at the latest at the end."""
    if sys.stdout is None:  # Python's way to say so; the next file to be opened would take its place
        raise OutputError("cannot write standard output: it is closed; send it to a file, or to /dev/null")
    with open(os.devnull, "w") as nowhere, redirect_stdout(_WatchedStream(sys.stdout if reports() else nowhere)):
        try:
            yield
        finally:
            sys.stdout.flush()


class _WatchedStream:
    """A stream whose failures can be told from those of files and connections."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream  # of text, or of bytes

    def write(self, content: Any) -> int:
        raw = getattr(self._stream, "buffer", self._stream)
        with self._watching():
            if not isinstance(raw, io.RawIOBase):
                return int(self._stream.write(content))
            # With PYTHONUNBUFFERED, Python drops what a write leaves over, and a reader that goes is not noticed.
            data = content if isinstance(content, bytes) else content.encode(self.encoding, self.errors)
            while data:
                if (written := raw.write(data)) is None:
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                data = data[written:]
            return len(content)

    @property
    def buffer(self) -> "_WatchedStream":
        """Where bytes go."""
        return _WatchedStream(self._stream.buffer)

    def flush(self) -> None:
        with self._watching():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @contextmanager
    def _watching(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError as error:
            discard(self._stream)
            raise ReaderGone from error
        except OSError as error:
            discard(self._stream)
            raise OutputError(f"cannot write standard output: {error.strerror or error}; send it elsewhere") from error


def discard(stream: TextIO) -> None:
    """Let what is left in the buffer go nowhere, or the interpreter fails once more when it ends."""
    with suppress(OSError), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())
