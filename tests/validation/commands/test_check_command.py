"""What ``check`` says of gradients in symbols, and of what is around the pipeline."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeproof.commands.cli import main
from pipeproof.pipeline.lower import lower
from pipeproof.pipeline.schedules import build
from tests.support.golden import golden
from tests.support.json_schema import documented


def test_what_gradients_are_made_of_is_proven_for_a_plan_of_any_size(capsys: pytest.CaptureFixture[str]) -> None:
    plan = ["interleaved", "--ranks", "16", "--virtual", "8", "--microbatches", "64"]
    assert main(["check", *plan, "--symbolic"]) == 0
    out = capsys.readouterr().out
    for _way in ("by name", "in order"):
        golden(out)


def test_terms_of_no_one_microbatch_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = "0F0,0F1,0SEND_F0,0SEND_F1,0RECV_B0,0RECV_B1,0B0,0B1", "1RECV_F1,1RECV_F0,1F0,1F1,1B0,1B1"
    (tmp_path / "x.csv").write_text(f"{first}\n{second},1SEND_B0,1SEND_B1\n")
    assert main(["check", str(tmp_path / "x.csv"), "--symbolic", "--json", str(tmp_path / "x.json")]) == 1
    out = capsys.readouterr().out
    golden(out)
    assert documented((tmp_path / "x.json").read_text())["symbolic"] == {"by name": True, "in order": False}


def test_a_deadlock_is_told_with_the_room_that_would_end_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.csv").write_text(
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
    )
    assert main(["check", str(tmp_path / "x.csv"), "--json", str(tmp_path / "x.json")]) == 1
    golden(capsys.readouterr().out)
    assert documented((tmp_path / "x.json").read_text())["room"] == {"strict": 1, "rank": 1, "pair": 1}


@pytest.mark.parametrize(
    "line",
    [
        "1f1b",
        "1f1b --symbolic --virtual 3",
        "x.csv --ranks 3",
    ],
)
def test_what_cannot_be_checked_is_a_sentence(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.csv").write_text("0F0,0B0\n1F0,1B0\n")
    assert main(["check", *shlex.split(line)]) == 2
    golden(capsys.readouterr().err)


SUMMED = "sums      dp 2, pp 4: each of 16 microbatches once in each gradient of 8 ranks, divided by 2"


def test_sums_around_the_pipeline_are_proven(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.json"
    assert main(["check", "1f1b", "--symbolic", "--mesh", "dp=2,pp=4", "--tied", "0,3", "--json", str(file)]) == 0
    golden(capsys.readouterr().out)
    assert documented(file.read_text())["sums"] is True


def test_copies_alone_are_within_a_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "zb-v", "--symbolic", "--tied", "0,7", "--tied", "1,2,3"]) == 0
    told = "each of 8 microbatches once in each gradient of 4 ranks, divided by 1, and 2 tied parameters summed"
    assert f"sums      pp 4: {told}\n" in capsys.readouterr().out


def mesh(path: Path, **more: Any) -> str:
    """The name of a mesh's file."""
    axes = {"dp": 2, "pp": 4}
    path.write_text(json.dumps({"format": "pipeproof/mesh", "version": 1, "axes": axes, **more}))
    return str(path)


def test_what_a_job_says_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "1f1b", "--symbolic", "--mesh", mesh(tmp_path / "right.json")]) == 0
    assert f"{SUMMED}\n" in capsys.readouterr().out
    file, wrong = tmp_path / "x.json", mesh(tmp_path / "wrong.json", sums=[])
    assert main(["check", "1f1b", "--symbolic", "--mesh", wrong, "--json", str(file)]) == 1
    out = capsys.readouterr().out
    golden(out)
    found = documented(file.read_text())
    assert found["sums"] is False
    assert found["symbolic"] == {"by name": True, "in order": True}


def traces(folder: Path, ranks: int, *, lost: str = "", groups: Sequence[Sequence[int]] = ()) -> list[str]:
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
        (folder / f"{rank}.json").write_text(json.dumps({"distributedInfo": said, "traceEvents": events}))
    return [str(folder / f"{rank}.json") for rank in range(ranks)]


def test_what_ran_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", *traces(tmp_path, 2), "--symbolic"]) == 0
    out = capsys.readouterr().out
    golden(out)
    assert main(["check", *traces(tmp_path, 2, lost="1B1"), "--symbolic"]) == 1
    golden(capsys.readouterr().out)


@pytest.mark.parametrize("cell", ["0SEND_F0", ""], ids=["program", "schedule"])
def test_no_sum_is_proven_of_what_comes_too_late(cell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "late.csv").write_text(
        f"0F0,{cell},{cell.replace('SEND_F', 'RECV_B')},0REDUCE_GRAD,0B0\n"
        f"{cell.replace('0SEND', '1RECV')},1F0,1B0,{cell.replace('0SEND_F', '1SEND_B')},1REDUCE_GRAD\n"
    )
    file = tmp_path / "x.json"
    late = ["check", str(tmp_path / "late.csv"), "--symbolic", "--mesh", "dp=2,pp=2", "--json", str(file)]
    assert main(late) == 1
    out = capsys.readouterr().out
    golden(out)
    assert documented(file.read_text())["sums"] is False


def test_what_all_replicas_ran_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    around = ["--symbolic", "--mesh", "dp=2,pp=2", "--microbatches", "2"]
    assert main(["check", *traces(tmp_path, 4), *around]) == 0
    out = capsys.readouterr().out
    golden(out)
    file = tmp_path / "found.json"
    assert main(["check", *traces(tmp_path, 4, lost="1B1"), *around, "--json", str(file)]) == 1
    out = capsys.readouterr().out
    golden(out)
    assert documented(file.read_text())["violations"][0]["law"] == "completeness"


def test_groups_are_those_that_the_job_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    around = ["--symbolic", "--mesh", "dp=2,pp=2"]
    assert main(["check", *traces(tmp_path, 4, groups=[[0, 2], [1, 3]]), *around]) == 0
    mixed = traces(tmp_path, 4, groups=[[0, 3], [1, 2]])
    assert main(["check", *mixed[:2], *around]) == 0  # of one pipeline nobody knows all groups
    assert "sums: dp:" not in capsys.readouterr().out
    assert main(["check", *mixed, *around]) == 1
    golden(capsys.readouterr().out, lines="sums: dp:")


def test_what_cannot_have_run_is_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = traces(tmp_path, 2)
    for words, said in (
        ([*ran, "--ranks", "3"], "--ranks is 3, but 0.json has 2: leave the option out"),
        ([ran[0]], "0.json: 0SEND_F0 meets stage 1, of which no trace tells: give those of all ranks"),
        ([*ran, "x.csv"], "expected one schedule, or the traces of one run, FILE.json"),
    ):
        assert main(["check", *words]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "--mesh dp=2,pp=4",
        "--tied 0,3",
        "--symbolic --mesh dp=2",
        "--symbolic --mesh dp=2,pp=3 --ranks 4",
        "--symbolic --mesh dp",
        "--symbolic --mesh no.json",
        "--symbolic --tied 0",
        "--symbolic --tied 0,4",
        "--symbolic --tied a,b",
        "--symbolic --tied '0,١'",
    ],
)
def test_a_mesh_that_cannot_be_is_a_sentence(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "1f1b", *shlex.split(line)]) == 2
    golden(capsys.readouterr().err)
