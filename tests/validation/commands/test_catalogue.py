"""The catalogue at work: what is run where, and what a reader sees of it."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from pipeproof.cases.case import SCHEDULES, Case
from pipeproof.cases.specimens import CONTROLS, ON_DEVICES, SPECIMENS, SpecimenError
from pipeproof.cases.trial import Named, Trial
from pipeproof.commands import catalogue
from pipeproof.commands.campaign import Setting
from pipeproof.commands.catalogue import cases_on, chosen, line, listing, try_all
from pipeproof.commands.ending import AskedToEnd
from pipeproof.commands.outputs import Outputs
from pipeproof.judging.verdict import Verdict
from pipeproof.worlds.world import World
from tests.support.json_schema import documented
from tests.validation.cases.test_trial import RIGHT, TRIAL


def test_a_line_says_what_was_caught_named_and_placed() -> None:
    assert line(TRIAL).split() == "one 1f1b scale gradient scale right - 0.5 s".split()
    unknown = replace(TRIAL, recorded=Named(None, False, False, 0.1), final=RIGHT)
    assert line(unknown).split() == "one 1f1b scale gradient unknown - scale 0.5 s".split()
    missed = replace(TRIAL, laws=("grad-norm",), recorded=Named("sign", False, False, 0.1))
    assert line(missed).split() == "one 1f1b scale NOT: grad-norm NOT: sign wrong - 0.5 s".split()
    assert line(replace(TRIAL, laws=())).split()[3:5] == ["NOT:", "nothing"]


def test_in_a_narrow_terminal_columns_are_left_out_before_names_are_cut() -> None:
    kind = "swapped-activations"
    long = replace(TRIAL, specimen=max(SPECIMENS, key=len), planted=kind, recorded=Named(kind, True, True, 0.1))
    for width in range(51, 150):
        text = line(long, width)
        assert len(text) <= width
        assert text.startswith(f"{long.specimen} ")
        assert text.split()[-1] in (kind, "right", "s", "-"), "nothing is cut"
    assert line(long, 51).split() == [long.specimen, kind], "what was planted, and what it was taken for"
    assert len(line(long, 20)) == 20


@pytest.mark.long
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_most_specimens_apply_to_every_schedule(schedule: str) -> None:
    cases, left_out = cases_on(SPECIMENS, [schedule])
    assert {case.specimen for case in cases} | {name for name, _ in left_out} == set(SPECIMENS)
    assert len(cases) >= 100
    assert all(why.startswith("needs ") for why in left_out.values())


def test_the_list_has_a_line_for_each_specimen() -> None:
    lines = listing(SPECIMENS).splitlines()
    assert [text.split()[0] for text in lines] == list(SPECIMENS)
    (alone,) = listing(["tied-not-reduced"]).splitlines()
    one = SPECIMENS["tied-not-reduced"]
    for word in ("tied tE,mC", one.fault.kind, one.smallest, one.summary, one.origin):
        assert word in alone


def test_names_are_chosen_or_refused() -> None:
    assert chosen("", device="cpu") == list(SPECIMENS)
    assert chosen("", device="cuda") == [*SPECIMENS, *ON_DEVICES]
    assert chosen("clip-twice, clip-never", device="cpu") == ["clip-twice", "clip-never"]
    with pytest.raises(SpecimenError, match="unknown specimen 'gremlin': pipeproof specimens --list prints all"):
        chosen("clip-twice,gremlin", device="cuda")
    assert chosen("other-device", device="cuda") == ["other-device"]
    with pytest.raises(SpecimenError, match="'other-device' needs a device other than the CPU: name its type with"):
        chosen("other-device", device="cpu")


@pytest.mark.pipeproof_ranks
def test_specimens_are_tried_and_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names, file = ["stage-negated", "backward-missing"], tmp_path / "x.json"
    assert try_all(names, [], Setting("cpu", outputs=Outputs(str(file)))) == 0
    out = capsys.readouterr().out
    assert "2 tried: 2 caught; of 2 diagnosed 2 named right (100.0 %), 2 located too (100.0 %)" in out
    assert "2 tried: 2 caught; of 1 diagnosed 1 named right" in out, "nothing ran of what a static law refused"
    written = documented(file.read_text())
    assert [one["specimen"] for one in written["specimens"]] == names
    assert [one["recorded"]["kind"] for one in written["specimens"]] == ["sign", "order"]


def test_what_is_not_caught_or_named_wrong_is_no_success_and_what_does_not_apply_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = Named("sign", False, False, 0.1)
    for trial in (replace(TRIAL, laws=()), replace(TRIAL, recorded=wrong), replace(TRIAL, final=wrong)):

        def tried(case: Case, world: World, *, record: bool, trial: Trial = trial) -> Trial:
            return trial

        monkeypatch.setattr(catalogue, "try_out", tried)
        assert try_all(["weight-half-dropped"], ["zb-h1"], Setting("cpu")) == 1
    assert try_all(["weight-half-dropped"], ["gpipe", "1f1b"], Setting("cpu")) == 1, "nothing was tried"
    out = capsys.readouterr().out
    assert "NOT: nothing" in out
    why = "needs a backward in two halves on the middle stage"
    assert f"left out, {why}: weight-half-dropped on gpipe 1f1b" in out


def test_an_interruption_says_how_many_were_not_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([TRIAL])

    def tried(case: Case, world: World, *, record: bool) -> Trial:
        if (trial := next(answers, None)) is None:
            raise AskedToEnd(signal.SIGINT)
        return trial

    monkeypatch.setattr(catalogue, "try_out", tried)
    with pytest.raises(AskedToEnd):
        try_all(["stage-negated", "layernorm-zero", "clip-twice"], [], Setting("cpu"), final_only=True)
    assert capsys.readouterr().out.endswith("; 2 did not run\n")


def test_a_false_alarm_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = Verdict("", "fail", "none", ())
    monkeypatch.setattr(catalogue, "validated", lambda case, world, measure: (failed, None))
    said = catalogue._controls(World(), Setting("cpu"))
    assert said.startswith(f"0 of {len(CONTROLS)} changes that are no faults pass; FALSE ALARM for slow-messages, ")
