"""What is said of a schedule on paper."""

import re
from pathlib import Path

import pytest

from pipeproof.commands.cli import main
from pipeproof.pipeline.schedules import build
from pipeproof.reports.colours import WRONG


def test_times_of_ones_own_stretch_the_grid(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "zb-h1", "--times", "1,2,1"]) == 0
    text = capsys.readouterr().out
    assert "makespan 38 (T_F = 1, T_I = 2, T_W = 1 per stage, T_B = T_I + T_W = 3, no latency)" in text
    assert "0I0 0I0" in text


def test_a_grid_has_whole_units_and_says_what_has_any(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "zb-h1", "--times", "1,1.5,1", "--trace", str(tmp_path / "x.json")]) == 0
    text = capsys.readouterr().out
    assert "which are not whole units; --svg or --png draws it)" in text
    assert "makespan 32.5 (T_F = 1, T_I = 1.5" in text
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
    said = capsys.readouterr().out
    assert "local-order: rank 1: 1B0 comes before 1F0" in said
    assert said.endswith("no trace is written, for what breaks a law has no times\n")
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
    assert_table(capsys.readouterr().out, "global bubble 18 (27.3%) 9 (15.8%) -9 (-50.0%)")
    picture = Path(paths[0]).read_text()
    assert picture.index("1f1b: P = 4") < picture.index("interleaved: P = 4 ranks, V = 2")
    assert "time in units of T_F, T_I and T_W of 1/8 of the model" in picture
    assert Path(paths[1]).read_text().count("process_name") == 2


def assert_table(said: str, row: str) -> None:
    assert row in [" ".join(line.split()) for line in said.splitlines()]


@pytest.mark.parametrize("files_first", [True, False])
def test_a_family_is_as_large_as_the_file_beside_it(
    files_first: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(build("gpipe", ranks=2, microbatches=3).to_csv())
    names = (str(path), "1f1b") if files_first else ("1f1b", str(path))
    assert main(["show", names[0], "--against", names[1]]) == 0
    said = capsys.readouterr().out
    assert said.count("2 ranks, 2 stages, 3 microbatches") == 2
    assert_table(said, "memory 3 2 -1 (-33.3%)" if files_first else "memory 2 3 +1 (+50.0%)")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--run"], "--against with --run: expected one of the two"),
        (["--virtual", "3"], "virtual is 3, but gpipe has one stage per rank"),
        (["--against", "nope"], "unknown schedule 'nope'"),
    ],
)
def test_what_cannot_be_compared_is_refused(more: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "gpipe", "--against", "1f1b", *more]) == 2
    assert words in capsys.readouterr().err
