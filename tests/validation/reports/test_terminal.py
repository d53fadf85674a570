"""Lines that commands say."""

import pytest

from pipeproof.reports.terminal import Terminal


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
