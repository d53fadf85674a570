"""Files that commands write: ``-`` is standard output for every one, and what else is said then goes aside."""

import json
import os
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeproof.commands.outputs import OutPath, Outputs, document, takes_standard_output
from pipeproof.core.cause import Cause, Cell, Cells, RuledOut
from pipeproof.core.verdict import LawResult, Mismatch, Size, Verdict
from pipeproof.pipeline.schedules import build
from pipeproof.worlds.output_file import finite
from tests.support import verdicts as shown
from tests.support.golden import golden
from tests.support.json_schema import OURS, complaints, documented
from tests.support.typed import Typed

PASSED = Verdict("c", "pass", "bitwise", (LawResult("loss", "pass", 1, 1),))
SHOW = ["show", "1f1b", "--ranks", "2", "--microbatches", "2"]


def test_a_document_has_its_verdicts_and_status() -> None:
    made: Any = document("gate", 0, [PASSED, PASSED], groups=[{"group": "table"}, {"group": "fuzz"}], seed=3)
    assert (made["schema"], made["command"], made["status"], made["seed"]) == ("pipeproof/3", "gate", 0, 3)
    assert [one["group"] for one in made["verdicts"]] == ["table", "fuzz"]


def test_standard_output_is_the_files_alone(typed: Typed) -> None:
    out, err = typed.only([*SHOW, "--trace", "-"])
    assert json.loads(out)["traceEvents"]
    golden(err)


FAILED = Verdict(
    "c",
    "fail",
    "none",
    (LawResult("gradient", "fail", 2, 1, 1, worst=float("inf"), left_out=("w",)),),
    (Mismatch("gradient", 1, Size((2,), 1.0), (0, None), rank=1, error=2.0),),
    (Cause("scale", factor=4.0, instead=(Cause("sign", rank=0),)),),
    ((Cause("zero"),),),
    (RuledOut(("dropped",), "every microbatch is there", 3),),
    cells=Cells(((Cell(None), Cell(1.0, ((1, 2.0),))),)),
)


def test_a_verdict_is_as_the_schema_says() -> None:
    text = json.dumps(finite(document("fuzz", 1, [FAILED, PASSED], seed=1)))
    assert documented(text)["verdicts"][0]["laws"][0]["worst"] == "inf"


def test_only_what_is_no_pass_has_all_numbers() -> None:
    passed = replace(shown.PASSED, measured=shown.FAILED.measured)
    made = [shown.FAILED, passed, replace(passed, outcome="unknown"), replace(shown.BARE, ended="hang")]
    data = documented(json.dumps(finite(document("validate", 1, made))))["verdicts"]
    assert ["measured" in one for one in data] == [True, False, True, True]
    assert len(json.dumps(data[1])) < len(json.dumps(data[2])) / 2


@pytest.mark.parametrize(
    ("command", "status", "has"),
    [
        (SHOW, 0, {"schedule", "timeline"}),
        (["plan", "--ranks", "2", "--microbatches", "4"], 0, {"options", "advice"}),
        (["plan", "--memory", "0.5"], 1, {"options", "advice"}),
        (["check", "good.csv"], 0, {"schedule", "transports", "room", "violations"}),
        (["check", "bad.csv"], 1, {"schedule", "transports", "room", "violations"}),
    ],
)
def test_commands_about_schedules_write_documents(
    command: list[str], status: int, has: set[str], typed: Typed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("good.csv").write_text("0F0,0B0\n1F0,1B0\n")
    Path("bad.csv").write_text("0F0,0B0,0B0\n1B0,1F0\n")
    out, err = typed.only([*command, "--json", "-"], status)
    data = documented(out)
    assert (data["command"], data["status"]) == (command[0], status)
    assert data.keys() - {"schema", "command", "status", "verdicts"} == has
    assert err, "what people read is said aside"


def test_what_the_schema_does_not_know_is_seen() -> None:
    for data in (document("show", 0, colour="red"), {**document("show", 0), "seed": "x"}):
        golden("\n".join(complaints(data, OURS, root=OURS)))


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (["advise", "--model", "gpt-1.7b"], 1),
        (["plan"], 1),
        (["show", "1f1b"], 4),
        (["show", "1f1b", "--against", "gpipe"], 7),
        (["check", "ok.csv"], 1),
        (["record", "1f1b r1 s1 m1 model=mlp plan=train", "--record", "x"], 1),
        (["compare", "x", "x"], 1),
        (["init", "own"], 1),
    ],
)
def test_quiet_leaves_what_does_not_pass(
    arguments: list[str], left: int, tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("ok.csv").write_text(build("1f1b", ranks=2, microbatches=2).to_csv())
    if arguments[0] == "compare":
        typed.only("record 1f1b r1 s1 m1 model=mlp plan=train --record x")
    assert typed.only([*arguments, "--quiet"])[0].count("\n") == left
    Path("ok.csv").write_text("0F0,0B0,0F1,0B1\n1F0,1B1,1F1,1B0\n")
    assert "local-order" in typed.only("check ok.csv --quiet", 1)[0], "what breaks a law is said"


@pytest.mark.parametrize(("one", "other"), [("x", "x"), ("x", "./x"), ("x", "link"), ("-", "-"), ("no/x", "y")])
def test_two_results_in_one_file_are_refused(
    one: str, other: str, tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("link").symlink_to("x")
    typed.refused(["show", "1f1b", "--json", one, "--svg", other])
    assert [*tmp_path.iterdir()] == [tmp_path / "link"]
    assert not takes_standard_output(Namespace(json=OutPath(os.devnull), html=OutPath(os.devnull)))


def test_a_page_may_say_what_no_encoding_has(tmp_path: Path) -> None:
    with Outputs.open("validate", {"html": str(tmp_path / "x.html")}) as files:
        assert files.finish(1, page=lambda: "a file named \udcff") == 1
    golden((tmp_path / "x.html").read_text())
