"""Lines that commands say."""

import io

import pytest

from pipeproof.reports.terminal import Manner, Terminal, speaking
from tests.support.golden import golden


def test_lines_are_plain_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal().say("FAIL gradient " + "x" * 200, "fail")
    assert capsys.readouterr().out == "FAIL gradient " + "x" * 200 + "\n"


@pytest.mark.usefixtures("rank_1")
def test_only_rank_0_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal().say("hello")
    assert capsys.readouterr().out == ""


def test_brackets_in_a_line_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal().say("float32[2, 4] [red]")
    assert capsys.readouterr().out == "float32[2, 4] [red]\n"


def test_who_wants_it_quiet_is_spared_details(capsys: pytest.CaptureFixture[str]) -> None:
    with speaking(Manner(quiet=True)):
        Terminal().detail("a pass")
        Terminal().say("the end")
    Terminal().detail("a pass")
    golden(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("color", "no_color", "seen"),
    [("auto", "", False), ("always", "", True), ("never", "", False), ("always", "1", True), ("auto", "1", False)],
)
def test_colour_is_as_it_is_wished(
    color: str, no_color: str, seen: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm-256color")
    with speaking(Manner(color=color)):  # type: ignore[arg-type]
        Terminal().say("FAIL gradient", "fail")
    assert ("\x1b[" in capsys.readouterr().out) is seen


@pytest.mark.parametrize("manner", [Manner(), Manner(color="never")])
def test_a_terminal_without_colour_has_no_codes(manner: Manner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr("sys.stdout", stream := Watched())
    with speaking(manner):
        Terminal().say("FAIL gradient", "fail")
    assert stream.getvalue() == "FAIL gradient\n"


class Watched(io.StringIO):
    """A terminal."""

    def isatty(self) -> bool:
        return True
