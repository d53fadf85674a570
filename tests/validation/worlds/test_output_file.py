"""Files that are whole or not there, whatever stands at their paths."""

import json
import os
import threading
from pathlib import Path
from typing import NoReturn

import pytest

from pipeproof.worlds.output_file import OutputError, OutputFile


def test_bytes_arrive_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    with OutputFile(str(path)) as file:
        file.write(b"\x89PNG\r\n")
    assert path.read_bytes() == b"\x89PNG\r\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_was_never_written_leaves_no_trace(tmp_path: Path) -> None:
    with OutputFile(str(tmp_path / "x.png")):
        assert list(tmp_path.iterdir()) != []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("rank_1")
def test_only_rank_0_of_a_launcher_writes(tmp_path: Path) -> None:
    with OutputFile(str(tmp_path / "x.png")) as file, OutputFile(str(tmp_path / "x.json")) as other:
        file.write(b"x")
        other.write_json({})
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_with_a_cure_that_fits() -> None:
    with pytest.raises(OutputError, match="cannot write /dev/full: No space left on device; make room there, or"):
        OutputFile("/dev/full").write(b"x")


def test_a_file_needs_a_name() -> None:
    with pytest.raises(OutputError, match="whose name is empty"):
        OutputFile("")


def test_a_file_is_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    with OutputFile(str(path)) as file:
        assert not path.exists()
        file.write_json({"schema": "x"})
    assert json.loads(path.read_text()) == {"schema": "x"}
    assert list(tmp_path.iterdir()) == [path]


def test_a_run_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    with pytest.raises(RuntimeError), OutputFile(str(path)):
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_numbers_that_are_not_finite_are_written_as_text(tmp_path: Path) -> None:
    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is no JSON")

    inf, path = float("inf"), tmp_path / "out.json"
    with OutputFile(str(path)) as file:
        file.write_json({"worst": inf, "laws": ({"error": float("nan")}, [-inf, 0.5, 1, None, True])})
    observed = json.loads(path.read_text(), parse_constant=refuse)
    assert observed == {"worst": "inf", "laws": [{"error": "nan"}, ["-inf", 0.5, 1, None, True]]}


def test_a_pipe_stays_one_and_is_written_into(tmp_path: Path) -> None:
    path, read = tmp_path / "pipe", []
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: read.append(path.read_text()), daemon=True)
    reader.start()
    with OutputFile(str(path)) as file:
        file.write_json({"schema": "x"})
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
    with OutputFile(str(link)) as file:
        file.write_json({"schema": "x"})
    assert link.is_symlink()
    assert json.loads(target.read_text()) == {"schema": "x"}
    assert target.stat().st_mode & 0o777 == (0o600 if there else 0o644)
    assert list(link.parent.iterdir()) == [link]


@pytest.mark.parametrize("name", ["no/such/folder.json", "."])
def test_a_path_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path, name: str) -> None:
    with pytest.raises(OutputError, match=r"cannot write .*; choose a file in an existing, writable folder"):
        OutputFile(str(tmp_path / name))


def test_no_path_writes_nothing() -> None:
    with OutputFile(None) as file:
        file.write_json({"schema": "x"})


def test_links_that_lead_to_each_other_are_told(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to(tmp_path / "other")
    (tmp_path / "other").symlink_to(tmp_path / "one")
    with pytest.raises(OutputError, match="links that lead to each other"):
        OutputFile(str(tmp_path / "one"))
