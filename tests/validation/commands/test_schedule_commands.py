"""What ``show``, ``plan`` and ``check`` say of schedules on paper, of what ran, in symbols, and around the pipeline."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from pipeproof.commands.cli import main
from pipeproof.pipeline.program import lower
from pipeproof.pipeline.schedules import build
from pipeproof.reports.colours import WRONG
from tests.support.golden import golden
from tests.support.json_schema import documented
from tests.support.typed import Typed

ZB_V = lower(build("zb-v", ranks=2, microbatches=4))
LATE = "0F0,{0},{1},0REDUCE_GRAD,0B0\n{2},1F0,1B0,{3},1REDUCE_GRAD\n"
FILES = {
    "mine": build("dualpipev", ranks=2, microbatches=4).to_csv(),
    "small": build("gpipe", ranks=2, microbatches=3).to_csv(),
    "broken": "0F0,0F1,0B0,0B1\n1F1,1B0,1F0,1B1\n",
    "lost": "0F0,0SEND_F0,0SEND_F0,0RECV_B0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
    "good": build("interleaved", ranks=2, virtual=2, microbatches=4).to_csv(),
    "bad": "0F0,0B0,0B0\n1B0,1F0\n",
    "typo": "0F0,0B0\n1F0,1X0\n",
    "program": ZB_V.with_waits.to_csv(),
    "waits": "0RECV_B0,0F0,0SEND_F0,0B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
    "unsent": "0F0,0B0,0RECV_B0\n1RECV_F0,1F0,1B0,1SEND_B0\n",
    "swapped": "0F0,0F1,0SEND_F0,0SEND_F1,0RECV_B0,0RECV_B1,0B0,0B1\n"
    "1RECV_F1,1RECV_F0,1F0,1F1,1B0,1B1,1SEND_B0,1SEND_B1\n",
    "hangs": "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
    "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n",
    "late": LATE.format("0SEND_F0", "0RECV_B0", "1RECV_F0", "1SEND_B0"),
    "late-plan": LATE.format("", "", "", ""),
}
MESHES: dict[str, dict[str, object]] = {"right": {}, "wrong": {"sums": []}}


def traces(name: str, ranks: int, *, lost: str = "", groups: Sequence[Sequence[int]] = ()) -> None:
    """Files as torch's profiler writes them, of replicas that ran 1F1B on two ranks each; rank 1 ``lost`` an action.

    ``groups``: of replicas, as a mesh names them.
    """
    rows = lower(build("1f1b", ranks=2, microbatches=2)).ranks
    for rank in range(ranks):
        ran = [str(action) for action in rows[rank % 2] if rank != 1 or str(action) != lost]
        mark = {"ph": "X", "cat": "user_annotation", "dur": 1}
        events = [{**mark, "name": f"PP:{action}", "ts": 2 * k} for k, action in enumerate(ran)]
        made = [{"pg_desc": "mesh_dp", "ranks": group} for group in groups if rank in group]
        said = {"rank": rank, "pg_config": made}
        Path(f"{name}{rank}.json").write_text(json.dumps({"distributedInfo": said, "traceEvents": events}))


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(f"{name}.csv").write_text(text)
    for name, more in MESHES.items():
        mesh = {"format": "pipeproof/mesh", "version": 1, "axes": {"dp": 2, "pp": 4}, **more}
        Path(f"{name}.json").write_text(json.dumps(mesh))
    traces("ran", 4)
    traces("lost", 4, lost="1B1")
    traces("grouped", 4, groups=[[0, 2], [1, 3]])
    traces("mixed", 4, groups=[[0, 3], [1, 2]])


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


def named(name: str, ranks: int = 4) -> str:
    return " ".join(f"{name}{rank}.json" for rank in range(ranks))


AROUND = "--symbolic --mesh dp=2,pp=2"
BOTH = {"by name": True, "in order": True}


@pytest.mark.parametrize(
    ("line", "status", "written"),
    [
        ("good.csv", 0, {"violations": []}),
        ("bad.csv", 1, {"room": {}}),
        ("program.csv", 0, {}),
        ("waits.csv", 1, {}),
        ("unsent.csv", 1, {}),
        ("hangs.csv", 1, {"room": {"strict": 1, "rank": 1, "pair": 1}}),
        ("interleaved --ranks 16 --virtual 8 --microbatches 64 --symbolic", 0, {"symbolic": BOTH}),
        ("swapped.csv --symbolic", 1, {"symbolic": {"by name": True, "in order": False}}),
        ("1f1b --symbolic --mesh dp=2,pp=4 --tied 0,3", 0, {"sums": True}),
        ("zb-v --symbolic --tied 0,7 --tied 1,2,3", 0, {"sums": True}),
        ("1f1b --symbolic --mesh right.json", 0, {"sums": True}),
        ("1f1b --symbolic --mesh wrong.json", 1, {"sums": False, "symbolic": BOTH}),
        (f"late.csv {AROUND}", 1, {"sums": False}),
        (f"late-plan.csv {AROUND}", 1, {"sums": False}),
        (f"{named('ran', 2)} --symbolic", 0, {}),
        (f"{named('lost', 2)} --symbolic", 1, {}),
        (f"{named('ran')} {AROUND} --microbatches 2", 0, {"sums": True}),
        (f"{named('lost')} {AROUND} --microbatches 2", 1, {"sums": False}),
        (f"{named('grouped')} {AROUND}", 0, {"sums": True}),
        (f"{named('mixed', 2)} {AROUND}", 0, {"sums": True}),  # of one pipeline, not all groups are known
        (f"{named('mixed')} {AROUND}", 1, {"sums": False}),
    ],
)
def test_what_is_found(line: str, status: int, written: dict[str, object], typed: Typed) -> None:
    typed(f"check {line} --json found.json", status)
    data = documented(Path("found.json").read_text())
    assert {name: data[name] for name in written} == written
    assert bool(data["violations"]) == bool(status)


@pytest.mark.parametrize(
    "line",
    [
        "1f1b",
        "typo.csv",
        "1f1b --symbolic --virtual 3",
        "small.csv --ranks 3",
        "ran0.json ran1.json --ranks 3",
        "ran0.json",
        "ran0.json ran1.json small.csv",
        "1f1b --mesh dp=2,pp=4",
        "1f1b --tied 0,3",
        "1f1b --symbolic --mesh dp=2",
        "1f1b --symbolic --mesh dp=2,pp=3 --ranks 4",
        "1f1b --symbolic --mesh dp",
        "1f1b --symbolic --mesh no.json",
        "1f1b --symbolic --tied 0",
        "1f1b --symbolic --tied 0,4",
        "1f1b --symbolic --tied a,b",
        "1f1b --symbolic --tied '0,١'",
    ],
)
def test_what_cannot_be_checked(line: str, typed: Typed) -> None:
    typed.refused(f"check {line}")
