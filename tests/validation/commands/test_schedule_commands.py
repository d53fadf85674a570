"""What ``show`` and ``plan`` say of schedules on paper."""

import re
from pathlib import Path

import pytest

from pipeproof.commands.cli import main
from pipeproof.pipeline.schedules import build
from pipeproof.reports.colours import WRONG
from tests.support.golden import golden
from tests.support.typed import Typed

FILES = {
    "mine": build("dualpipev", ranks=2, microbatches=4).to_csv(),
    "small": build("gpipe", ranks=2, microbatches=3).to_csv(),
    "broken": "0F0,0F1,0B0,0B1\n1F1,1B0,1F0,1B1\n",
    "lost": "0F0,0SEND_F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
}


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(f"{name}.csv").write_text(text)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("show mine.csv", 0),
        ("show zb-h1 --times 1,2,1", 0),
        ("show zb-h1 --times 1,1.5,1 --trace x.json", 0),
        ("show small.csv --against 1f1b", 0),
        ("show 1f1b --against small.csv", 0),
        ("plan --ranks 2 --costs 4,1,1,1,1,4 --times 1,2,1", 0),
        ("plan --memory 0.5", 1),
        ("plan --costs 1,1,1", 1),
    ],
)
def test_what_is_said(line: str, status: int, typed: Typed) -> None:
    typed(line, status)
    assert Path("x.json").exists() == ("--trace" in line)


def test_a_plan_lists_what_fits(typed: Typed) -> None:
    out = typed("plan --ranks 8 --microbatches 32 --memory 5", lines="^v-half|^gpipe")
    assert out.splitlines()[1].startswith("v-half"), "the best first"


@pytest.mark.parametrize(("name", "red"), [("broken", ["1B0", "1F0"]), ("lost", ["0SEND_F0"] * 2)])
def test_what_breaks_a_law_is_red(name: str, red: list[str], typed: Typed) -> None:
    typed(f"show {name}.csv --svg x.svg --trace x.json", 1)
    assert re.findall(f'fill="{WRONG}"><title>([^:]*):', Path("x.svg").read_text()) == red
    assert not Path("x.json").exists()


def test_two_are_drawn_on_one_axis(typed: Typed) -> None:
    typed("show 1f1b --against interleaved --svg x.svg --trace x.json")
    golden("\n".join(re.findall(r">([^<]* ranks, [^<]*|time in [^<]*)<", Path("x.svg").read_text())))
    assert Path("x.json").read_text().count("process_name") == 2


@pytest.mark.parametrize("more", ["--run", "--virtual 3", "--against nope", "--json x"])
def test_what_cannot_be_compared(more: str, typed: Typed) -> None:
    typed.refused(f"show gpipe --against 1f1b {more}")


@pytest.mark.parametrize("option", ["ranks", "microbatches", "virtual"])
@pytest.mark.parametrize("command", ["show", "validate --schedule"])
def test_an_option_that_a_file_contradicts(command: str, option: str, typed: Typed) -> None:
    typed.refused(f"{command} mine.csv --{option} 5")
    assert main(["show", "mine.csv", "--ranks", "2"]) == 0
