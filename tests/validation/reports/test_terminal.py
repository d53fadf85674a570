"""Lines that commands say."""

import io

import pytest

from pipeproof.reports.terminal import Manner, Terminal, speaking
from tests.support.golden import golden
from tests.support.typed import Typed


@pytest.mark.parametrize("text", ["FAIL gradient " + "x" * 200, "float32[2, 4] [red]"])
def test_lines_are_plain_and_whole_where_nobody_watches(text: str, typed: Typed) -> None:
    Terminal().say(text, "fail")
    assert typed.said() == f"{text}\n"


@pytest.mark.usefixtures("rank_1")
def test_only_rank_0_speaks(typed: Typed) -> None:
    Terminal().say("hello")
    assert typed.said() == ""


def test_who_wants_it_quiet_is_spared_details(typed: Typed) -> None:
    with speaking(Manner(quiet=True)):
        Terminal().detail("a pass")
        Terminal().say("the end")
    Terminal().detail("a pass")
    golden(typed.said())


@pytest.mark.parametrize(
    ("color", "no_color", "observed"),
    [("auto", "", False), ("always", "", True), ("never", "", False), ("always", "1", True), ("auto", "1", False)],
)
def test_colour_is_as_it_is_wished(
    color: str, no_color: str, observed: bool, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm-256color")
    with speaking(Manner(color=color)):  # type: ignore[arg-type]
        Terminal().say("FAIL gradient", "fail")
    assert ("\x1b[" in typed.said()) is observed


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
