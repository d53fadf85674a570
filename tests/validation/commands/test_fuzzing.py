"""Fuzz campaigns: what is told of what they find, and that a long one goes on where it stopped."""

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeproof.commands import fuzzing
from pipeproof.commands.campaign import Setting, composed_verdict
from pipeproof.commands.ending import AskedToEnd
from pipeproof.commands.fuzzing import Wish, fuzz_all
from pipeproof.commands.outputs import Outputs
from pipeproof.core.verdict import LawResult, Mismatch, Verdict
from pipeproof.own.case import Case
from pipeproof.own.fuzz import SmallestFailure, Tally, judge_case
from pipeproof.own.validator import decided_by
from pipeproof.worlds.world import World
from tests.support.golden import golden
from tests.support.json_schema import documented
from tests.support.typed import Typed

SOUND = Case("1f1b", 1, 1, 2, (1,), model="mlp", plan=("train",))
LAWS = tuple(LawResult(name, "pass", 1, 1) for name in ("loss", "gradient", "grad-norm"))
PASSED = Verdict("c", "pass", "bitwise", LAWS)


def test_undecided_cases_are_no_verdict(typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    def fuzz(world: World, tally: Tally, **_: object) -> None:
        tally.undecided += [SmallestFailure(SOUND, replace(PASSED, outcome="unknown"))] * 2

    monkeypatch.setattr(fuzzing, "fuzz", fuzz)
    status = fuzz_all(Setting("cpu"), Wish(9, 0, ("1f1b",), ("fp32",), 4))
    assert status == 3
    golden(typed.said())


def test_a_failure_that_was_not_shrunk_yet(tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    def fuzz(world: World, tally: Tally, **_: object) -> None:
        tally.failures += [
            SmallestFailure(replace(SOUND, microbatches=m), replace(PASSED, outcome="fail")) for m in (9, 3)
        ]
        raise AskedToEnd(signal.SIGINT)

    path = tmp_path / "x.json"
    monkeypatch.setattr(fuzzing, "fuzz", fuzz)
    with pytest.raises(AskedToEnd), Outputs.open("fuzz", {"json": str(path)}) as outputs:
        fuzz_all(Setting("cpu", outputs=outputs), Wish(9, 0, ("1f1b",), ("fp32",), 4))
    golden(typed.said())
    data = documented(path.read_text())
    assert (len(data["verdicts"]), data["status"]) == (1, 130)


def test_composed_cases_are_drawn(typed: Typed) -> None:
    options = ["--check", "composed", "--world", "simulated", "--cases", "2", "--max-ranks", "2"]
    typed(["fuzz", *options])


def test_a_wrong_composed_case_can_be_replayed(simulated: World) -> None:
    case = Case.parse("1f1b r2 s2 m2 split=1,1 model=mlp plan=train seed=0 specimen=loss-undivided")
    found = judge_case(case, simulated, validated=composed_verdict)
    assert found.outcome == "fail"
    assert "--check composed --world" in found.replay


def test_only_our_runtime_can_be_composed(typed: Typed) -> None:
    typed.refused(["fuzz", "--check", "composed", "--runtime", "torch"])


class Judge:
    """In the place of all ranks: every case passes but those of these numbers, at which something else happens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **at: int) -> None:
        self.at = {number: what for what, number in at.items()}
        self.ran: list[str] = []
        monkeypatch.setattr(fuzzing, "PART", 4)
        monkeypatch.setattr(fuzzing, "judge_case", self)

    def __call__(self, case: Case, world: World) -> Verdict:
        self.ran.append(f"{case} {world.decision}")
        verdict: Any = self.at.get(len(self.ran), "pass")
        if verdict == "interrupted":
            raise AskedToEnd(signal.SIGINT)
        mismatches = () if verdict == "pass" else (Mismatch("loss", 1, "a", "b"),)
        return decided_by(replace(PASSED, config=str(case), outcome=verdict, mismatches=mismatches), world.decision)


def campaign(file: Path, cases: int = 10) -> str:
    return f"fuzz --cases {cases} --world simulated --transport any --resume {file}"


def test_a_campaign_goes_on_where_it_was_interrupted(
    tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, whole = tmp_path / "a.json", Judge(monkeypatch)
    typed.only(campaign(tmp_path / "whole.json"))
    first = Judge(monkeypatch, interrupted=7)
    typed(campaign(file), 130)
    rest = Judge(monkeypatch)
    typed(campaign(file))
    assert first.ran[:4] + rest.ran == whole.ran, "the part that was interrupted runs again, and those before it do not"
    once_more = Judge(monkeypatch)
    typed.only(campaign(file))
    assert once_more.ran == []
    typed.only(campaign(file, cases=12))
    assert len(once_more.ran) == 2
    assert json.loads(file.read_text())["counts"]["verdicts"] == {"pass": 12}


def test_a_part_that_found_something_is_not_done(tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.json"
    for number in (6, 2):
        Judge(monkeypatch, fail=number)
        typed.only(campaign(file), 1)  # what fails but once is told all the same
        assert json.loads(file.read_text())["parts"] == 1


def test_what_was_left_open_earlier_is_still_open(
    tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    Judge(monkeypatch, unknown=2)
    for cases in (4, 8):
        assert "rounding" in (said := typed.only(campaign(tmp_path / "a.json", cases), 3)[0])
        assert "--world simulated --transport" in said


@pytest.mark.parametrize(
    ("content", "more"),
    [("", ""), ("{}", ""), *((None, more) for more in ("--seed 7", "--schedule 1f1b", "--interleaving 3"))],
)
def test_a_file_of_something_else_is_refused(
    content: str | None, more: str, tmp_path: Path, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, judge = tmp_path / "a.json", Judge(monkeypatch)
    typed.only(campaign(file, cases=1))
    if content is not None:
        file.write_text(content)
    before = file.read_text()
    typed.refused(f"{campaign(file)} {more}")
    assert (file.read_text(), len(judge.ran)) == (before, 1)
