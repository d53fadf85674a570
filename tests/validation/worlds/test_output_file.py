"""Files of bytes that are whole or not there. What they do with links, pipes and bad paths: test_terminal."""

from pathlib import Path

import pytest

from validation.worlds.output_file import OutputError, OutputFile


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
    with OutputFile(str(tmp_path / "x.png")) as file:
        file.write(b"x")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_with_a_cure_that_fits() -> None:
    with pytest.raises(OutputError, match="cannot write /dev/full: No space left on device; make room there, or"):
        OutputFile("/dev/full").write(b"x")


def test_a_file_needs_a_name() -> None:
    with pytest.raises(OutputError, match="whose name is empty"):
        OutputFile("")
