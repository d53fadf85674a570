"""The catalogue at work: what is run where, what counts as caught, named and located, and the tables of it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from validation import catalogue
from validation.campaign import Setting
from validation.case import SCHEDULES, Case
from validation.catalogue import (
    Result,
    case_for,
    cases_on,
    chosen,
    confusion,
    line,
    listing,
    located,
    summary,
    try_all,
)
from validation.cause import Cause
from validation.specimens import CONTROLS, SPECIMENS, SpecimenError
from validation.world import World

RESULT = Result("one", "1f1b r2 s2 m2", "gradient", "scale", ("gradient", "grad-norm"), None, False, 0.5)


def test_a_fault_is_caught_by_its_own_law_and_named_by_its_own_kind() -> None:
    assert RESULT.caught
    assert not replace(RESULT, laws=("grad-norm",)).caught
    assert not RESULT.right
    assert replace(RESULT, named="scale").right
    assert not replace(RESULT, named="sign").right


def test_a_place_is_right_if_it_says_all_that_was_planted() -> None:
    planted = Cause("dropped", rank=1, stage=2, microbatches=(0,))
    assert located(planted, replace(planted, action="2F0", parameter="w", factor=0.0))
    assert not located(planted, replace(planted, microbatches=(1,)))
    assert not located(planted, replace(planted, stage=None))
    assert located(Cause("norm"), planted)


def test_confusion_has_a_line_for_each_planted_kind_with_the_right_name_first() -> None:
    pairs = [("scale", None), ("scale", "scale"), ("scale", "sign"), ("scale", "sign"), ("dropped", "dropped")]
    assert confusion(pairs) == "dropped  dropped 1\nscale    scale 1, sign 2, - 1"
    assert confusion([]) == ""


def test_a_line_says_what_was_caught_named_and_placed() -> None:
    assert line(RESULT).split() == "one 1f1b scale gradient - - 0.5 s".split()
    right = replace(RESULT, named="scale", located=True)
    assert line(right).split() == "one 1f1b scale gradient scale right 0.5 s".split()
    missed = replace(RESULT, laws=("grad-norm",), named="sign")
    assert line(missed).split() == "one 1f1b scale NOT: grad-norm sign wrong 0.5 s".split()
    assert line(replace(RESULT, laws=())).split()[3:5] == ["NOT:", "nothing"]
    assert summary([RESULT, right, missed]) == "3 tried: 2 caught, 1 named right, 1 named wrong, 1 located; 1.5 s"


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_most_specimens_apply_to_every_schedule(schedule: str) -> None:
    cases, left_out = cases_on(SPECIMENS, [schedule])
    assert {case.specimen for case in cases} | {name for name, _ in left_out} == set(SPECIMENS)
    assert len(cases) >= 100
    assert all(why.startswith("needs ") for why in left_out.values())


def test_a_case_has_what_its_specimen_needs() -> None:
    case = case_for(SPECIMENS["mean-of-means"], "interleaved")
    assert (case.stages, case.loss, case.unequal, case.plan, case.specimen) == (
        8,
        "tokens",
        True,
        ("train",),
        "mean-of-means",
    )
    assert case_for(SPECIMENS["layer-skipped"], "1f1b").split == (2, 2, 2, 2)
    assert case_for(SPECIMENS["tied-not-reduced"], "gpipe").model == "gpt-tied"


def test_the_list_has_a_line_for_each_specimen() -> None:
    lines = listing().splitlines()
    assert [text.split()[0] for text in lines] == list(SPECIMENS)
    (alone,) = listing(["tied-not-reduced"]).splitlines()
    one = SPECIMENS["tied-not-reduced"]
    for word in ("tied tE,mC", one.fault.kind, one.smallest, one.summary, one.origin):
        assert word in alone


def test_names_are_chosen_or_refused() -> None:
    assert chosen("") == list(SPECIMENS)
    assert chosen("clip-twice, clip-never") == ["clip-twice", "clip-never"]
    with pytest.raises(SpecimenError, match="unknown specimen 'gremlin': pipeproof specimens --list prints all"):
        chosen("clip-twice,gremlin")


@pytest.mark.ranks
def test_specimens_are_tried_and_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names, file = ["stage-negated", "backward-missing"], tmp_path / "x.json"
    assert try_all(names, [], Setting("cpu", json=str(file))) == 0
    out = capsys.readouterr().out
    assert "2 tried: 2 caught" in out
    assert "order  - 1\nsign   - 1" in out
    written = json.loads(file.read_text())
    assert written["schema"] == "pipeproof/specimens/1"
    assert [one["specimen"] for one in written["specimens"]] == names
    assert [one["caught"] for one in written["specimens"]] == [True, True]


def test_what_is_not_caught_is_no_success_and_what_does_not_apply_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missed(case: Case, world: World) -> Result:
        return replace(RESULT, laws=())

    monkeypatch.setattr(catalogue, "try_out", missed)
    assert try_all(["weight-half-dropped"], ["zb-h1"], Setting("cpu")) == 1
    assert try_all(["weight-half-dropped"], ["gpipe", "1f1b"], Setting("cpu")) == 1, "nothing was tried"
    out = capsys.readouterr().out
    assert "NOT: nothing" in out
    why = "needs a backward in two halves on the middle stage"
    assert f"left out, {why}: weight-half-dropped on gpipe 1f1b" in out


def test_a_false_alarm_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failed:
        verdict = "fail"

    monkeypatch.setattr(catalogue, "validate", lambda case, world: Failed)
    said = catalogue._controls(World())
    assert said.startswith(f"0 of {len(CONTROLS)} changes that are no faults pass; FALSE ALARM for slow-messages, ")
