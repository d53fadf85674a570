"""Lines, and a file of verdicts that is whole or not there."""

import json
import os
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from validation.reports.terminal import JsonFile, Terminal
from validation.worlds.output_file import OutputError


def test_lines_are_plain_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal().say("FAIL gradient " + "x" * 200, "fail")
    assert capsys.readouterr().out == "FAIL gradient " + "x" * 200 + "\n"


@pytest.mark.usefixtures("rank_1")
def test_only_rank_0_speaks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
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


def test_numbers_that_are_not_finite_are_written_as_text(tmp_path: Path) -> None:
    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is no JSON")

    inf, path = float("inf"), tmp_path / "out.json"
    with JsonFile(str(path)) as file:
        file.write({"worst": inf, "laws": ({"error": float("nan")}, [-inf, 0.5, 1, None, True])})
    seen = json.loads(path.read_text(), parse_constant=refuse)
    assert seen == {"worst": "inf", "laws": [{"error": "nan"}, ["-inf", 0.5, 1, None, True]]}


def test_a_pipe_stays_one_and_is_written_into(tmp_path: Path) -> None:
    path, read = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_text()), daemon=True)
    reader.start()
    with JsonFile(str(path)) as file:
        file.write({"schema": "x"})
    assert path.is_fifo()
    reader.join(10.0)
    assert json.loads(read[0]) == {"schema": "x"}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_one_and_its_target_is_written(tmp_path: Path, there: bool) -> None:
    target, link = tmp_path / "target.json", tmp_path / "folder" / "link.json"
    link.parent.mkdir()
    link.symlink_to(Path("..") / "target.json")
    if there:
        target.write_text("old")
        target.chmod(0o600)
    with JsonFile(str(link)) as file:
        file.write({"schema": "x"})
    assert link.is_symlink()
    assert json.loads(target.read_text()) == {"schema": "x"}
    assert target.stat().st_mode & 0o777 == (0o600 if there else 0o644)
    assert list(link.parent.iterdir()) == [link]


@pytest.mark.parametrize("name", ["no/such/folder.json", "."])
def test_a_path_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputError, match=r"cannot write .*; choose a file in an existing, writable folder"):
        JsonFile(str(tmp_path / name))


def test_no_path_writes_nothing() -> None:
    with JsonFile(None) as file:
        file.write({"schema": "x"})
