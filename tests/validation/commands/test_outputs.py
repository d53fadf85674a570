"""Files that commands write: ``-`` is standard output for every one, and what else is said then goes aside."""

import json
from pathlib import Path

import pytest

from pipeproof.cli import main
from pipeproof.commands.outputs import Outputs, document
from pipeproof.judging.verdict import LawResult, Verdict

PASSED = Verdict("c", "pass", "bitwise", (LawResult("loss", "pass", 1, 1),))
SHOW = ["show", "1f1b", "--ranks", "2", "--microbatches", "2"]


def test_a_document_has_the_verdicts_as_a_list_and_says_how_it_ended() -> None:
    made = document("gate", 0, [PASSED, PASSED], groups=[{"group": "table"}, {"group": "fuzz"}], seed=3)
    assert (made["schema"], made["command"], made["status"], made["seed"]) == ("pipeproof/3", "gate", 0, 3)
    assert [one["group"] for one in made["verdicts"]] == ["table", "fuzz"]  # type: ignore[attr-defined]


def test_a_file_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot write"), Outputs(str(tmp_path / "no" / "x.json")).opened("validate"):
        pytest.fail("the work began")


def test_standard_output_is_the_files_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHOW, "--trace", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["traceEvents"]
    assert "rank 0 | 0F0 0F1" in err


def test_two_files_cannot_both_be_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHOW, "--trace", "-", "--svg", "-"]) == 2
    assert capsys.readouterr().err == "pipeproof: --svg and --trace are both -: standard output takes one file\n"
