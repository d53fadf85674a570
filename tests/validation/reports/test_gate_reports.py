"""What follows from the cases of a gate, and how it is told: JUnit, Markdown, annotations."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

from pipeproof.cases.case import Case
from pipeproof.judging.verdict import LawResult, Mismatch, Verdict
from pipeproof.reports.gate_reports import CaseResult, GateResult, Group, annotations, junit, markdown

LINE = "gpipe r2 s2 m2 split=1,1 model=mlp plan=train seed=0"


def result(outcome: Any, *, group: Group = "table", microbatches: int = 2, failure: str = "") -> CaseResult:
    case = Case.parse(LINE.replace("m2", f"m{microbatches}"))
    laws = (LawResult("gradient", outcome, 8, 8 * (outcome == "pass"), 3 * (outcome != "pass"), 0.5, 1e-7),)
    mismatch = Mismatch("gradient", 1, "norm 0", "norm 1", rank=1, stage=1, parameter="w|x")
    wrong = () if outcome == "pass" or failure else (mismatch,)
    return CaseResult(group, case, Verdict(str(case), outcome, "none", laws, wrong, failure=failure, seconds=0.25))


def gated(*cases: CaseResult, due: int | None = None) -> GateResult:
    return GateResult(cases, len(cases) if due is None else due, 7)


PASS, FAIL, UNKNOWN = result("pass"), result("fail", microbatches=3), result("unknown", microbatches=1)
CAUGHT, MISSED = result("fail", group="planted"), result("pass", group="planted")


@pytest.mark.parametrize(
    ("cases", "due", "status"),
    [
        ([PASS, PASS], 2, 0),
        ([PASS, CAUGHT], 2, 0),
        ([PASS, FAIL, UNKNOWN], 3, 1),
        ([PASS, UNKNOWN], 2, 3),
        ([PASS, PASS], 3, 3),
        ([FAIL], 3, 1),
        ([PASS, MISSED], 2, 3),
        ([], 1, 3),
    ],
)
def test_the_status_is_that_of_the_worst_and_a_short_gate_is_no_pass(
    cases: Sequence[CaseResult], due: int, status: int
) -> None:
    assert gated(*cases, due=due).status == status


def test_a_gate_says_what_it_lacks() -> None:
    short = GateResult([PASS], 3, 7, {"zb-v": "it has two stages per rank"})
    assert str(short) == ("gate UNKNOWN: 1 pass of 3 cases; seed 7; 1 of 3 cases ran; zb-v: it has two stages per rank")
    assert str(gated(PASS)) == "gate PASS: 1 pass of 1 case; seed 7"


def test_a_hang_is_no_mere_doubt() -> None:
    hung, raised = (replace(UNKNOWN, verdict=replace(UNKNOWN.verdict, ended=ended)) for ended in ("hang", "error"))
    made = gated(PASS, hung, raised, CAUGHT)
    assert str(made).startswith("gate UNKNOWN: 1 hang, 1 error, 2 pass of 4 cases")
    assert "| **hang** |" in markdown(made)


def test_junit_has_a_case_for_each_and_one_for_their_number() -> None:
    suite = ElementTree.fromstring(junit(gated(PASS, FAIL, UNKNOWN, CAUGHT, due=5)))[0]
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "time")} == {
        "tests": "5",
        "failures": "1",
        "errors": "2",
        "time": "1.000",
    }
    assert [[child.tag for child in case] for case in suite] == [[], ["failure"], ["error"], [], ["error"]]
    assert suite[1].get("name") == str(FAIL.case)
    assert suite[1].get("classname") == "pipeproof.table.gpipe"
    assert "where     rank 1, stage 1, parameter w|x" in (suite[1][0].text or "")
    assert suite[4][0].get("message") == "4 of 5 cases ran"


def test_junit_is_xml_whatever_a_rank_said() -> None:
    bad = result("unknown", failure="rank 0 raised ValueError: \x1b[31m<&\x00\ud800]]>")
    suite = ElementTree.fromstring(junit(gated(bad)))[0]
    assert "rank 0 raised ValueError: ?[31m<&??]]>" in (suite[0][0].text or "")


def test_annotations_are_few_and_the_culprit_comes_first() -> None:
    many = [UNKNOWN, *(result("fail", microbatches=m) for m in (9, 3, 5, 7, 11, 13)), PASS]
    lines = annotations(gated(*many))
    assert len(lines) == 6
    assert lines[0].startswith("::error title=pipeproof%3A gpipe r2 s2 m3 split=1%2C1 ")
    assert "%0A  where     rank 1, stage 1" in lines[0]
    assert lines[-1] == "::error title=pipeproof::2 more cases are no pass: see the job summary"
    assert all("\n" not in line for line in lines)
    assert annotations(gated(PASS, due=2)) == ["::error title=pipeproof%3A the gate is short::1 of 2 cases ran"]
    assert annotations(gated(PASS, CAUGHT)) == []


def test_the_summary_is_a_table_with_what_is_no_pass_first() -> None:
    text = markdown(gated(PASS, FAIL))
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows[0] == "| | case | tier | worst error | floor | seconds |"
    assert rows[1].startswith(f"| **fail** | `{FAIL.case}` | none | 5.0e-01 | 1.0e-07 | 0.2 |")
    assert rows[2].startswith("| pass |")
    assert "### pipeproof gate FAIL: 1 fail, 1 pass of 2 cases; seed 7" in text
    assert "```text\nFAIL gradient (3 of 8)" in text
    fenced = result("unknown", failure="```\nx")
    assert "````text\n" in markdown(gated(fenced))
    long = markdown(gated(*[PASS] * 100))
    assert "40 more, all of them pass." in long


def test_a_planted_fault_that_is_not_caught_is_said() -> None:
    assert CAUGHT.headline.endswith("is caught")
    assert MISSED.headline.endswith("is not caught: pass")
    assert MISSED.outcome == "unknown"
