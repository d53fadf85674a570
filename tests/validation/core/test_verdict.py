"""The verdict as data."""

import json
from dataclasses import replace

import pytest

from pipeproof.core.cause import Cause
from pipeproof.core.verdict import LawResult, Mismatch, NoVerdict, PipelineMismatch, Verdict, overall
from tests.support.golden import golden

PASS, FAIL, UNKNOWN, SKIPPED = (LawResult("x", o) for o in ("pass", "fail", "unknown", "not applicable"))


@pytest.mark.parametrize(
    ("laws", "outcome"),
    [
        ([PASS, SKIPPED], "pass"),
        ([PASS, UNKNOWN], "unknown"),
        ([PASS, UNKNOWN, FAIL], "fail"),
        ([SKIPPED], "unknown"),
        ([], "unknown"),
    ],
)
def test_the_worst_law_decides_and_nothing_exercised_is_unknown(laws: list[LawResult], outcome: str) -> None:
    assert overall(laws) == outcome


@pytest.mark.parametrize(("outcome", "status"), [("pass", 0), ("fail", 1), ("unknown", 3)])
def test_exit_status(outcome: str, status: int) -> None:
    assert Verdict("c", outcome, "none", ()).exit_status == status  # type: ignore[arg-type]


def test_a_verdict_is_plain_data_with_its_replay_line() -> None:
    verdict = Verdict("1f1b r1 s1 m1", "fail", "none", (FAIL,), (Mismatch("x", 1, "a", "b", rank=3),))
    data = json.loads(json.dumps(verdict.as_dict()))
    assert data["schema"] == "pipeproof/3"
    golden(data["replay"])
    assert data["mismatches"][0]["rank"] == 3
    assert {"config", "outcome", "tier", "laws", "mismatches", "causes", "replay"} <= set(data)


def test_where_names_what_is_known() -> None:
    known = Mismatch("x", 1, "", "", rank=1, stage=2, microbatch=3, action="2F3", parameter="w")
    golden(known.where)
    assert Mismatch("x", 1, "", "").where == "every rank"


def test_a_law_is_found_by_name() -> None:
    assert Verdict("c", "pass", "bitwise", (PASS,)).law("x") is PASS


def test_what_is_raised_tells_a_wrong_answer_from_none_and_has_a_short_text() -> None:
    wrong = Verdict("c", "fail", "none", (FAIL,), causes=(Cause("scale", factor=4.0), Cause("dropped", stage=1)))
    with pytest.raises(PipelineMismatch) as caught:
        wrong.raise_if_failed()
    nameless = PipelineMismatch(replace(wrong, causes=()))
    hung = Verdict("c", "unknown", "none", (), headline="rank 0 is stuck", ended="hang")
    with pytest.raises(NoVerdict) as none:
        hung.raise_if_failed()
    golden("\n".join(one.verdict.reason for one in (caught.value, nameless, none.value)))
    golden(str(none.value))
