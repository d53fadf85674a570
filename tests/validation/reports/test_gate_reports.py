"""What follows from the cases of a gate, and how it is told: JUnit, Markdown, annotations."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import pytest

from pipeproof.core.verdict import LawResult, Mismatch, Verdict
from pipeproof.own.case import Case
from pipeproof.reports.gate_reports import CaseResult, GateResult, Group, annotations, junit, markdown
from tests.support.golden import golden

LINE = "gpipe r2 s2 m2 split=1,1 model=mlp plan=train seed=0"


def result(outcome: Any, *, group: Group = "table", microbatches: int = 2, failure: str = "") -> CaseResult:
    case = Case.parse(LINE.replace("m2", f"m{microbatches}"))
    laws = (LawResult("gradient", outcome, 8, 8 * (outcome == "pass"), 3 * (outcome != "pass"), 0.5, 1e-7),)
    mismatch = Mismatch("gradient", 1, "norm 0", "norm 1", rank=1, stage=1, parameter="w|x")
    wrong = () if outcome == "pass" or failure else (mismatch,)
    verdict = Verdict(str(case), outcome, "none", laws, wrong, failure=failure, seconds=0.25)
    return CaseResult(verdict, group, str(case), "gpipe", (case.stages, microbatches), case.specimen)


def gated(*cases: CaseResult, expected: int | None = None) -> GateResult:
    return GateResult(cases, len(cases) if expected is None else expected, 7)


PASS, FAIL, UNKNOWN = result("pass"), result("fail", microbatches=3), result("unknown", microbatches=1)
CAUGHT, MISSED = result("fail", group="planted"), result("pass", group="planted")


@pytest.mark.parametrize(
    ("cases", "expected", "status"),
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
def test_the_status_of_a_gate(cases: Sequence[CaseResult], expected: int, status: int) -> None:
    assert gated(*cases, expected=expected).status == status


def test_a_gate_says_what_it_lacks_and_what_hung() -> None:
    hung, raised = (replace(UNKNOWN, verdict=replace(UNKNOWN.verdict, ended=ended)) for ended in ("hang", "error"))
    short = GateResult([PASS], 3, 7, {"zb-v": "it has two stages per rank"})
    golden("\n".join(map(str, (short, gated(PASS), made := gated(PASS, hung, raised, CAUGHT)))))
    assert "| **hang** |" in markdown(made)


def test_junit_has_a_case_for_each() -> None:
    suite = ElementTree.fromstring(junit(gated(PASS, FAIL, UNKNOWN, CAUGHT, expected=5)))[0]
    assert [suite.get(name) for name in ("tests", "failures", "errors", "time")] == ["5", "1", "2", "1.000"]
    assert [[child.tag for child in case] for case in suite] == [[], ["failure"], ["error"], [], ["error"]]
    assert suite[1].get("name") == FAIL.title
    assert suite[1].get("classname") == "pipeproof.table.gpipe"
    golden(suite[1][0].text or "")
    golden(suite[4][0].get("message"))
    bad = result("unknown", failure="rank 0 raised ValueError: \x1b[31m<&\x00\ud800]]>")
    golden(ElementTree.fromstring(junit(gated(bad)))[0][0][0].text or "")


def test_annotations_are_few_and_the_culprit_comes_first() -> None:
    many = [UNKNOWN, *(result("fail", microbatches=m) for m in (9, 3, 5, 7, 11, 13)), PASS]
    lines = annotations(gated(*many))
    assert len(lines) == 6
    assert all("\n" not in line for line in lines)
    golden("\n".join([lines[0], lines[-1], *annotations(gated(PASS, expected=2))]))
    assert annotations(gated(PASS, CAUGHT)) == []


def test_the_summary_begins_with_what_is_no_pass() -> None:
    text = markdown(gated(PASS, FAIL))
    golden(text)
    assert "````text\n" in markdown(gated(result("unknown", failure="```\nx")))
    golden(markdown(gated(*[PASS] * 100)))


def test_a_planted_fault_that_is_missed() -> None:
    golden(f"{CAUGHT.headline}\n{MISSED.headline}")
    assert MISSED.outcome == "unknown"
