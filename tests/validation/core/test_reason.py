"""Why something is unknown, as a value that goes where its note goes."""

import json
import pickle
from dataclasses import replace
from importlib.resources import files

import pytest

from pipeproof.core.reason import Doubt, Reason, reasons_of
from pipeproof.core.verdict import LawResult, Verdict
from pipeproof.records.record import RecordError


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_has_one_sentence_and_one_cure(reason: Reason) -> None:
    for text in (reason.sentence, reason.cure):
        assert (text[0].isupper(), text.find(".")) == (True, len(text) - 1)


def test_a_note_keeps_its_own_reason_wherever_it_goes() -> None:
    note = Reason.CALLS.doubt("stage 1")
    assert (str(note), note.reasons) == ("stage 1", (Reason.CALLS,))
    passed_on = pickle.loads(pickle.dumps(note)), Reason.LINK.doubt(note), str(RecordError(note)), str(note)
    assert [reasons_of(one) for one in passed_on] == [(Reason.CALLS,)] * 4
    assert reasons_of(note, "no doubt", Reason.LINK.doubt("it"), Doubt(note)) == (Reason.CALLS, Reason.LINK)


def test_the_schema_lists_them() -> None:
    schema = json.loads(files("pipeproof.reports").joinpath("schema.json").read_text())
    assert schema["$defs"]["law"]["properties"]["reasons"]["items"]["enum"] == list(Reason)


def test_what_makes_it_known_is_told_once_for_each_reason() -> None:
    rounding = LawResult("gradient", "unknown", reasons=(Reason.ROUNDING, Reason.HOOKS))
    unseen = LawResult("loss", "not observed", reasons=(Reason.UNREPORTED,))
    laws = rounding, replace(rounding, name="grad-norm", reasons=(Reason.ROUNDING,)), unseen
    verdict = Verdict("c", "unknown", "none", laws)
    cures = [Reason.ROUNDING.cure, Reason.HOOKS.cure]
    assert verdict.next == verdict.as_dict()["next"] == cures
    assert verdict.details.splitlines()[1:3] == [f"  next      {cures[0]}", f"            {cures[1]}"]
    assert all(cure in verdict.to_html() for cure in cures)
    assert replace(verdict, outcome="fail").next == [*cures, Reason.UNREPORTED.cure], "no cause says what to try"
