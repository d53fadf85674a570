"""Several cases in a row: what one that crashes does to the others, the file and the exit status."""

import re
import signal
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from pipeproof.commands import campaign
from pipeproof.commands.campaign import Setting, exit_status, validate_all
from pipeproof.commands.ending import AskedToEnd
from pipeproof.commands.fuzzing import Wish, fuzz_all
from pipeproof.commands.outputs import Outputs
from pipeproof.core.verdict import LawResult, Verdict
from pipeproof.own.case import Case
from pipeproof.worlds.rank_report import NeedsMoreRanks
from tests.support.golden import golden
from tests.support.json_schema import documented
from tests.support.page_text import PageText
from tests.support.typed import Typed
from tests.support.verdicts import PASSED

SOUND = Case("1f1b", 1, 1, 2, (1,), model="mlp", plan=("train",))
WRONG = Case("1f1b", 1, 1, 2, (1,), model="mlp", plan=("train",), specimen="stage-negated")
# Swapped inputs of unequal lengths: the loss cannot even be formed, so a rank raises a ValueError of torch's.
CRASHES = Case("1f1b", 1, 1, 3, (1,), model="gpt", ragged=True, plan=("train",), specimen="microbatches-swapped")


def run(cases: list[Case], path: Path) -> tuple[int, list[str]]:
    with Outputs.open("validate", {"json": str(path)}) as outputs:
        status = validate_all(cases, Setting("cpu", outputs=outputs))
    return status, [verdict["outcome"] for verdict in documented(path.read_text())["verdicts"]]


@pytest.mark.pipeproof_ranks
def test_a_crash_does_not_stop_the_others(tmp_path: Path, typed: Typed) -> None:
    assert run([CRASHES, SOUND], tmp_path / "x.json") == (3, ["unknown", "pass"])
    out = typed.said()
    golden(re.sub("(ValueError): .*", r"\1", out), lines="^ERROR|^  again|bit for bit$")
    assert "batch_size" in out


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks
def test_the_page_of_one_case_and_of_several(tmp_path: Path) -> None:
    path = tmp_path / "x.html"
    path.write_text("what was there before")
    with Outputs.open("validate", {"html": str(path)}) as outputs:
        setting = Setting("cpu", outputs=outputs)
        assert validate_all([SOUND], setting) == 0
        assert f"<title>Pass: {SOUND}" in path.read_text()
        assert validate_all([WRONG, SOUND], setting) == 1
        golden(PageText(path.read_text()).lines, lines="^Of ")
        assert [one.name for one in tmp_path.iterdir()] == ["x.html"]
        assert fuzz_all(setting, Wish(2, 0, ("1f1b",), ("fp32",), 1)) == 0
    golden(PageText(path.read_text()).lines, lines="^All ")


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks
def test_a_case_that_cannot_show_its_fault(tmp_path: Path, typed: Typed) -> None:
    assert run([replace(SOUND, microbatches=1, specimen="activation-nan")], tmp_path / "x.json") == (0, ["pass"])
    golden(typed.said(), lines="cannot show|^1 pass")


@pytest.mark.sweep
@pytest.mark.pipeproof_ranks
def test_a_crash_hides_no_wrong_answer(tmp_path: Path) -> None:
    assert run([WRONG, CRASHES], tmp_path / "x.json") == (1, ["fail", "unknown"])


def test_the_exit_status_is_that_of_the_worst() -> None:
    law = (LawResult("x", "pass", 1, 1),)
    passed, failed, unknown = (Verdict("c", v, "none", law) for v in ("pass", "fail", "unknown"))  # type: ignore[arg-type]
    assert [exit_status(vs) for vs in ([passed], [passed, unknown], [unknown, failed], [])] == [0, 3, 1, 3]


@pytest.mark.parametrize("line", ["validate --schedule 1f1b --model mlp", "fuzz --cases 1", "show 1f1b --run"])
def test_too_small_a_world_is_a_sentence(line: str, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    def small(*_: object, **__: object) -> None:
        raise NeedsMoreRanks(4, 2)

    monkeypatch.setattr("pipeproof.worlds.world.World.run", small)
    typed.refused(line, "4 ranks, 2 here; start more ranks, or ask for fewer with --ranks or --max-ranks")


def test_what_was_found_before_an_interruption(tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    path, answers = tmp_path / "x.json", [(PASSED, None), (PASSED, None), AskedToEnd(signal.SIGINT)]
    monkeypatch.setattr(campaign, "validate_case", mock.Mock(side_effect=answers))
    with pytest.raises(AskedToEnd):
        run([SOUND] * 5, path)
    golden(typed.said().splitlines()[-1])
    data = documented(path.read_text())
    assert (len(data["verdicts"]), data["interrupted"], data["status"]) == (2, True, 130)
