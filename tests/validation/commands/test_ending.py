"""How a command ends: each ending has its status and at most one sentence."""

import errno
import io
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import pytest

from pipeproof.commands import ending
from pipeproof.commands.ending import UNREAD, Asked, AskedToEnd, ReaderGone, run_command, standard_output
from pipeproof.pipeline.laws import LawBroken
from pipeproof.worlds.output_file import OutputError
from pipeproof.worlds.timeout import END_S
from tests.support.golden import golden
from tests.support.typed import Typed

SCRIPT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]["scripts"]["pipeproof"]


def raising(error: BaseException) -> Callable[[], int]:
    def command() -> NoReturn:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "status"),
    [(LawBroken("no"), 1), (ValueError("no"), 2), (RuntimeError("ours"), 3), (KeyboardInterrupt(), 130)],
)
def test_each_end_is_said_once(error: BaseException, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(raising(error)) == status
    golden("standard error:\n".join(capsys.readouterr()))


@pytest.mark.parametrize(
    ("number", "word", "handler"),
    [
        (signal.SIGINT, "interrupted", signal.default_int_handler),
        (signal.SIGTERM, "terminated", signal.SIG_DFL),
        (signal.SIGHUP, "terminated", signal.SIG_DFL),
    ],
)
def test_a_request_to_end_is_met_in_order(
    number: int, word: str, handler: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    left: list[str] = []

    def command() -> int:
        try:
            os.kill(os.getpid(), number)
            return 0
        finally:
            left.append("in order")

    before = signal.signal(number, handler)
    try:
        assert run_command(command) == 128 + number
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)
    assert left == ["in order"]
    assert capsys.readouterr().err == f"pipeproof: {word}\n"


class Dying:
    """Its end is a place where exceptions are swallowed, as a garbage collector's callback is."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)  # a bytecode or two for the signal to be observed in


def test_a_request_where_nothing_can_be_raised(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        Dying()
        time.sleep(10.0)
        return 0

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        assert run_command(command) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "pipeproof: interrupted\n"


def test_variables_of_another_program_do_not_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, text)
    assert run_command(raising(ValueError("no"))) == 2
    assert run_command(raising(LawBroken("broken"))) == 1
    assert capsys.readouterr() == ("broken\n", "pipeproof: no\n")


@pytest.mark.usefixtures("rank_1")
def test_rank_0_has_the_last_word(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    waits: list[float] = []
    monkeypatch.setattr(ending.time, "sleep", waits.append)
    assert run_command(raising(ValueError("no"))) == 2
    assert run_command(lambda: 0) == 0
    assert waits == [END_S]
    assert capsys.readouterr() == ("", "")


class Broken(io.StringIO):
    """A stream that fails, when written to or when flushed."""

    def __init__(self, number: int, *, late: bool) -> None:
        super().__init__()
        self._error = OSError(number, os.strerror(number))
        self._late = late

    def write(self, text: str) -> int:
        if not self._late:
            raise self._error
        return super().write(text)

    def flush(self) -> None:
        raise self._error


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.EPIPE, ReaderGone, "^$"),
        (errno.ENOSPC, OutputError, "^cannot write standard output: No space left on device; send it elsewhere$"),
    ],
)
def test_what_it_fails_with_is_its_own(
    number: int, kind: type[Exception], words: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout", Broken(number, late=late))
    with pytest.raises(kind, match=words), standard_output():
        sys.stdout.write("x")


class Narrow(io.RawIOBase):
    """A pipe that takes three bytes at a time, and whose reader goes after so many."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.taken, self._most = b"", most

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if len(self.taken) >= self._most:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        self.taken += bytes(data[:3])
        return len(data[:3])


@pytest.mark.parametrize("kind", [io.BufferedWriter, lambda raw: raw], ids=["buffered", "unbuffered"])
def test_what_one_write_leaves_over_is_written_too(kind: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own unbuffered stream drops it, and a reader that has gone is not noticed."""
    for most, expected in ((99, "äbcdefgh".encode()), (6, "äbcdefgh".encode()[:6])):
        raw = Narrow(most)
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(kind(raw), "utf-8", write_through=True))
        with nullcontext() if most == 99 else pytest.raises(ReaderGone), standard_output():
            sys.stdout.write("äbcdefgh")
        assert raw.taken == expected


def test_closed_it_is_refused_before_the_work(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert run_command(lambda: pytest.fail("the work began")) == 2
    golden(capsys.readouterr().err)
    monkeypatch.setattr("sys.stderr", None)  # nothing can be said, and the status is the same
    assert run_command(raising(ValueError("no"))) == 2


@pytest.mark.usefixtures("rank_1")
def test_a_rank_that_does_not_report_prints_nothing(typed: Typed) -> None:
    with standard_output():
        sys.stdout.write("x")
    assert typed.said() == ""


SHOW = ("-m", "pipeproof", "show", "1f1b", "--ranks", "40", "--microbatches", "300")


def piped(redirection: str, *arguments: str, unbuffered: bool = False) -> tuple[int, str]:
    """The command's own exit status and its standard error, with standard output as the shell redirects it."""
    command = f'set -o pipefail; "$0" "$@" {redirection}'
    given = {**os.environ, "PYTHONUNBUFFERED": "1" if unbuffered else ""}
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=given,
    )
    return done.returncode, done.stderr


@pytest.mark.pipeproof_ranks  # it starts processes
@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize(
    ("redirection", "status", "said"),
    [
        ("| head -1", UNREAD, ""),
        (">/dev/full", 2, "pipeproof: cannot write standard output: No space left on device; send it elsewhere\n"),
        (">&-", 2, "pipeproof: cannot write standard output: it is closed; send it to a file, or to /dev/null\n"),
    ],
)
def test_as_a_shell_redirects_it(redirection: str, status: int, said: str, unbuffered: bool) -> None:
    """What SHOW writes is far more than a pipe holds, so ``head`` is gone before all is written."""
    assert piped(redirection, *SHOW, unbuffered=unbuffered) == (status, said)


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks  # it starts processes
def test_where_even_the_complaint_cannot_be_written() -> None:
    assert piped("2>/dev/full", *SHOW, "--virtual", "2", unbuffered=True) == (2, "")


RUNS = """
import os, signal
from pipeproof.commands.ending import leave, run_command
signal.signal(signal.SIGINT, signal.default_int_handler)
leave(run_command(lambda: os.kill(os.getpid(), signal.SIGINT)))
"""
IMPORTED = """
import os, signal, sys
class Asking:
    def find_spec(name, *_):
        if name == "pipeproof.commands.ending":
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Asking)
sys.argv = ["pipeproof", "--help"]
"""


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (RUNS, "pipeproof: interrupted\n"),
        (f"{IMPORTED}import runpy; runpy.run_module('pipeproof', run_name='__main__')", ""),
        (
            f"{IMPORTED}from importlib.metadata import EntryPoint as E\n"
            f"E('pipeproof', '{SCRIPT}', 'console_scripts').load()()",
            "",
        ),
    ],
    ids=["runs", "a module is imported", "a script is imported"],
)
def test_a_loop_in_a_shell_stops(code: str, said: str) -> None:
    """A shell goes on after a program that exits with 130, and stops after one that the signal ended."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", said)


def test_only_the_block_that_is_asked_ends() -> None:
    with Asked() as asked:
        raise AskedToEnd(signal.SIGINT)
    assert asked.request.status == 130
    with pytest.raises(OSError, match="x"), Asked():
        raise OSError("x")
    with pytest.raises(BrokenPipeError), standard_output():
        raise BrokenPipeError  # what fails elsewhere is no failure of standard output
