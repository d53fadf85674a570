"""What is said of a schedule on paper."""

import re
from pathlib import Path

import pytest

from pipeproof.commands.cli import main
from pipeproof.pipeline.schedules import build
from pipeproof.reports.colours import WRONG
from tests.support.golden import golden


def test_times_of_ones_own_stretch_the_grid(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "zb-h1", "--times", "1,2,1"]) == 0
    golden(capsys.readouterr().out)


def test_a_grid_has_whole_units_and_says_what_has_any(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "zb-h1", "--times", "1,1.5,1", "--trace", str(tmp_path / "x.json")]) == 0
    golden(capsys.readouterr().out)
    assert (tmp_path / "x.json").exists()


BROKEN = "0F0,0F1,0B0,0B1\n1F1,1B0,1F0,1B1\n"


def drawn(tmp_path: Path, text: str, *more: str) -> tuple[int, str]:
    """The status of ``show`` for a file of ``text``, and the SVG that it drew."""
    (tmp_path / "mine.csv").write_text(text)
    status = main(["show", str(tmp_path / "mine.csv"), "--svg", str(tmp_path / "x.svg"), *more])
    return status, (tmp_path / "x.svg").read_text()


def test_a_broken_schedule_is_drawn_with_the_broken_place_in_red(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, picture = drawn(tmp_path, BROKEN, "--trace", str(tmp_path / "x.json"))
    assert status == 1
    assert re.findall(f'fill="{WRONG}"><title>(...):', picture) == ["1B0", "1F0"]
    golden(capsys.readouterr().out)
    assert not (tmp_path / "x.json").exists()


def test_a_program_with_a_lost_message_is_not_drawn_as_if_it_were_whole(tmp_path: Path) -> None:
    status, picture = drawn(tmp_path, "0F0,0SEND_F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n")
    assert status == 1
    assert re.findall(f'fill="{WRONG}"><title>([^:]*):', picture) == ["0SEND_F0"] * 2


def test_two_schedules_are_drawn_on_one_axis_with_their_numbers_side_by_side(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(tmp_path / name) for name in ("x.svg", "x.json")]
    assert main(["show", "1f1b", "--against", "interleaved", "--svg", paths[0], "--trace", paths[1]]) == 0
    golden(capsys.readouterr().out)
    golden("\n".join(re.findall(r">([^<]* ranks, [^<]*|time in [^<]*)<", Path(paths[0]).read_text())))
    assert Path(paths[1]).read_text().count("process_name") == 2


@pytest.mark.parametrize("files_first", [True, False])
def test_a_family_is_as_large_as_the_file_beside_it(
    files_first: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(build("gpipe", ranks=2, microbatches=3).to_csv())
    names = (str(path), "1f1b") if files_first else ("1f1b", str(path))
    assert main(["show", names[0], "--against", names[1]]) == 0
    golden(capsys.readouterr().out)


@pytest.mark.parametrize(
    "more", [("--run",), ("--virtual", "3"), ("--against", "nope")], ids=["run", "virtual", "against"]
)
def test_what_cannot_be_compared_is_refused(more: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "gpipe", "--against", "1f1b", *more]) == 2
    golden(capsys.readouterr().err)
