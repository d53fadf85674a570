"""Lines, and a file of verdicts that is whole or not there."""

import json
from pathlib import Path

import pytest

from validation.terminal import JsonFile, OutputError, Terminal


def test_lines_are_plain_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal().say("FAIL gradient " + "x" * 200, "fail")
    assert capsys.readouterr().out == "FAIL gradient " + "x" * 200 + "\n"


def test_only_rank_0_speaks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "1")
    Terminal().say("hello")
    with JsonFile(str(tmp_path / "x.json")) as file:
        file.write({})
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


def test_brackets_in_a_line_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal().say("float32[2, 4] [red]")
    assert capsys.readouterr().out == "float32[2, 4] [red]\n"


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    with JsonFile(str(path)) as file:
        assert not path.exists()
        file.write({"schema": "x"})
    assert json.loads(path.read_text()) == {"schema": "x"}
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    with pytest.raises(RuntimeError), JsonFile(str(path)):
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["no/such/folder.json", "."])
def test_a_path_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputError, match=r"cannot write .*; choose a file in an existing, writable folder"):
        JsonFile(str(tmp_path / name))


def test_no_path_writes_nothing() -> None:
    with JsonFile(None) as file:
        file.write({"schema": "x"})
