"""How a command ends: each ending has its status and at most one sentence."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from pipeline.laws import LawBroken
from validation.commands import ending
from validation.commands.ending import ended


def raising(error: BaseException) -> Callable[[], int]:
    def command() -> NoReturn:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "status", "out", "err"),
    [
        (LawBroken("no"), 1, "no\n", ""),
        (ValueError("no"), 2, "", "pipeproof: no\n"),
        (KeyboardInterrupt(), 3, "", "pipeproof: interrupted\n"),
    ],
)
def test_each_end_is_said_once(
    error: BaseException, status: int, out: str, err: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(raising(error)) == status
    assert capsys.readouterr() == (out, err)


def test_a_fault_of_ours_is_no_wrong_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(raising(RuntimeError("x"))) == 3
    assert "a fault in pipeproof itself: RuntimeError('x'); please report it" in capsys.readouterr().err


ASKED = pytest.mark.parametrize(
    ("number", "word", "handler"),
    [
        (signal.SIGINT, "interrupted", signal.default_int_handler),
        (signal.SIGTERM, "terminated", signal.SIG_DFL),
        (signal.SIGHUP, "terminated", signal.SIG_DFL),
    ],
)


@ASKED
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
        assert ended(command) == 3
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)
    assert left == ["in order"]
    assert capsys.readouterr().err == f"pipeproof: {word}\n"


class Dying:
    """Its end is a place where exceptions are swallowed, as a garbage collector's callback is."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)  # a bytecode or two for the signal to be seen in


def test_a_request_that_falls_where_nothing_can_be_raised_is_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        Dying()
        time.sleep(10.0)
        return 0

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        assert ended(command) == 3
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "pipeproof: interrupted\n"


def test_a_rank_that_some_program_left_behind_does_not_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, text)
    assert ended(raising(ValueError("no"))) == 2
    assert ended(raising(LawBroken("broken"))) == 1
    assert capsys.readouterr() == ("broken\n", "pipeproof: no\n")


@pytest.mark.usefixtures("rank_1")
def test_other_ranks_leave_the_last_word_to_rank_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(ending.time, "sleep", waits.append)
    assert ended(raising(ValueError("no"))) == 2
    assert ended(lambda: 0) == 0
    assert waits == [10.0]
    assert capsys.readouterr() == ("", "")


def test_standard_error_that_is_closed_changes_no_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    assert ended(raising(ValueError("no"))) == 2
