"""``ci/tolerance``: it measures, writes both files or refuses before it starts."""

import importlib.util
import re
from pathlib import Path

import pytest
from gap_survey import main

from tests.support.golden import golden

needs_matplotlib = pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="needs the extra 'plot'")
SMALL = ["--model", "mlp", "--dtype", "fp32", "--microbatches", "2"]


def test_a_survey_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0
    out = capsys.readouterr().out
    golden(out, lines="^Made by")
    assert "- *drop*: +" in out


@pytest.mark.long
@needs_matplotlib
def test_a_page_and_its_picture_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    markdown, svg = tmp_path / "a.md", tmp_path / "b.svg"
    assert main([*SMALL, "--markdown", str(markdown), "--svg", str(svg)]) == 0
    assert capsys.readouterr().out == ""
    assert "(b.svg)" in markdown.read_text()
    assert svg.read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--microbatches", "4,1"], "--microbatches 1: expected at least 2"),
        (["--microbatches", "4,x"], "invalid counts value: '4,x'"),
        (["--dtype", "fp8"], "--dtype fp8: unknown dtype 'fp8'"),
        (["--model", "lstm"], "unknown model 'lstm'"),
        (["--markdown", "/no/such/folder/x.md"], "cannot write /no/such/folder/x.md"),
    ],
)
def test_bad_input_is_a_sentence(arguments: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        main(arguments)
