"""A verdict as a page: it says what the text and the JSON say, and nobody's name becomes markup."""

import json
import math
import re
from dataclasses import replace

import pytest

from pipeproof.core.cause import Cause, OwnLine
from pipeproof.core.measured import Done, Measured, Weights
from pipeproof.core.observe.stack import Line
from pipeproof.core.verdict import LawResult, Verdict
from pipeproof.pipeline.action import Kind
from pipeproof.reports.gate_reports import CaseResult
from pipeproof.reports.page.page import campaign, page
from tests.support.golden import golden
from tests.support.page_text import PageText
from tests.support.verdicts import BARE, CELLS, COMPARED, FAILED, LAWS, PASSED, RAN, WRONG, large

EVIL = "</script><script>alert('x')</script>&\"'"


def said(verdict: Verdict) -> str:
    return PageText(verdict.to_html()).text


def told(verdict: Verdict) -> str:
    """What the page of a verdict says, up to the versions of this run."""
    return PageText(verdict.to_html()).lines.partition("\nThis run\n")[0]


@pytest.mark.parametrize("verdict", [FAILED, PASSED, BARE], ids=lambda one: one.outcome)
def test_a_page_says_all_that_there_is(verdict: Verdict) -> None:
    golden(told(verdict), exact=True)


def test_text_json_and_page_say_the_same() -> None:
    shown, data, text = said(FAILED), json.loads(json.dumps(FAILED.as_dict())), FAILED.details
    (cause,), measured = data["causes"], data["measured"]
    both = [cause["detail"], data["replay"]]
    once = [" ".join(text.split()), data["config"], *data["versions"].values()]
    for law in data["laws"]:
        counts = f"{law['checked']} {law['exact']}" if law["checked"] else "- -"
        once += [law["note"], f"{law['name']} {law['outcome']} {counts}"]
    once += [mismatch[side] for mismatch in data["mismatches"] for side in ("observed_text", "expected_text")]
    once += [one["evidence"] for one in data["ruled_out"]]
    for one in measured["compared"]:
        once += [one.get("parameter", ""), f"{one.get('observed', 2.5):.9g}"]
    for one in (one for one in measured["ran"]["tensors"] if one.get("agrees") is False):
        once += [one["what"], f"{one['error']:.1e}"]
    assert [one for one in once + both if one not in shown] + [one for one in both if one not in text] == []
    assert measured["ran"]["ranks"][1][0] == "1F0"


def test_a_cell_says_what_was_seen() -> None:
    told = json.loads(re.search('id="data">(.*?)</script>', page(FAILED), re.DOTALL)[1])  # type: ignore[index]
    action, head, state, _, tensors = told["cells"][4]
    assert (action, state) == ("1F0", "culprit")
    golden(head)
    assert tensors == [["took input", "microbatch 1's", "microbatch 0's", "9.0e-01", "1.0e-06"]]


@pytest.mark.parametrize("verdict", [FAILED, PASSED, BARE], ids=lambda one: one.outcome)
def test_a_page_needs_nothing_from_elsewhere(verdict: Verdict) -> None:
    made = page(verdict)
    assert not re.search(r"https?:|\bsrc=|@import|url\((?!#)", made)
    golden(" ".join(sorted(PageText(made).names)))


def test_no_name_becomes_markup() -> None:
    cause = replace(FAILED.causes[0], parameter=EVIL, detail=EVIL)
    evil = replace(
        FAILED,
        config=EVIL,
        causes=(cause,),
        rerun=EVIL,
        laws=(replace(LAWS[3], name=EVIL, note=EVIL, left_out=(EVIL,)),),
        mismatches=(replace(FAILED.mismatches[0], parameter=EVIL, text=EVIL),),
        undecided=(EVIL,),
        failure=EVIL,
        traceback=EVIL,
        measured=replace(
            FAILED.measured,
            compared=tuple(replace(one, parameter=EVIL) for one in COMPARED),
            ran=replace(RAN, ranks=((Done(0, Kind.FORWARD, 0, (replace(WRONG, what=EVIL, observed=EVIL),)),),)),
            weights=(Weights(EVIL, CELLS.rows[0], EVIL),),
        ),
    )
    plain, made = page(FAILED), page(evil)
    assert made.count("<script") == plain.count("<script") == 2
    assert made.count("</script>") == 2
    assert "alert('x')" not in re.sub('id="data">.*?</script>', "", made, flags=re.DOTALL)
    assert EVIL in PageText(made).text


def test_other_explanations_and_links() -> None:
    own = OwnLine("1F0", Line("/my code/loop.py", 7, "step", "y = f(x)"))
    cause = replace(FAILED.causes[0], lines=(own, replace(own, line=replace(own.line, file="<string>"))))
    verdict = replace(FAILED, causes=(cause,), alternatives=((Cause("mispaired", stage=1), Cause("sign")),))
    golden(told(verdict).partition("\nWhere\n")[0], exact=True)
    assert re.findall('href="(file:.*?)"', page(verdict)) == ["file:///my%20code/loop.py"]


def test_what_was_not_recorded_is_said() -> None:
    undecided = replace(BARE, failure="", laws=(LawResult("comparable", "unknown", note="another seed"),), headline="")
    golden(told(undecided))
    golden(told(replace(FAILED, measured=Measured())), exact=True)


def test_a_page_says_nothing_twice() -> None:
    shown = said(FAILED).partition(" As text ")[0]
    assert not re.search("tier none|bindings not recorded", shown + said(BARE))
    later = replace(FAILED, mismatches=(replace(FAILED.mismatches[0], operation=2),), bindings="")
    golden(told(later), lines="of the plan")
    assert said(PASSED).count("tier fp32") == 1


def test_a_hang_and_a_crash_say_so() -> None:
    waits = "ranks 0 and 1 wait for each other: rank 0 for 0RECV_B0 with rank 1, rank 1 for 1RECV_F0 with rank 0"
    for ended, kind in (("hang", "deadlock"), ("error", "crash")):
        verdict = replace(BARE, ended=ended, headline=waits, causes=(Cause(kind, rank=0, detail="0RECV_B0"),))
        assert "Unknown" not in said(verdict)
        golden(told(verdict))
        golden(told(replace(verdict, causes=())))
        rows = PageText(campaign([CaseResult(verdict)] * 2, said="two", left_out={})).text
        assert rows.count(f"{ended} mine") == 2


def test_the_page_of_a_planted_fault() -> None:
    entries = [CaseResult(PASSED), CaseResult(FAILED, "planted", size=(1,), fault="layernorm-zero")]
    golden(PageText(campaign(entries, said="gate PASS", left_out={})).lines, exact=True)


@pytest.mark.long
def test_a_page_of_10_000_cells_is_small() -> None:
    made = page(large())
    assert 1e5 < len(made.encode()) < 5e6


@pytest.mark.parametrize("odd", [math.nan, math.inf, 0.0, 5e-324, 1e300])
def test_odd_numbers_are_shown(odd: float) -> None:
    compared = tuple(
        replace(one, error=odd, limit=limit, observed=odd) for one in COMPARED for limit in (None, 0.0, odd)
    )
    tensors = (replace(WRONG, error=odd, limit=odd), replace(WRONG, agrees=True, error=odd, limit=None))
    ran = replace(RAN, ranks=((replace(RAN.ranks[0][0], sights=tensors, microbatch=None),), ()))
    verdict = replace(FAILED, measured=replace(FAILED.measured, compared=compared, ran=ran), seconds=odd)
    laws = (replace(LAWS[0], worst=odd, floor=odd), *LAWS[1:])
    assert f"{odd:.9g}" in said(replace(verdict, laws=laws, outcome="unknown", stopped="x (y.py:1)", traceback="t"))
    made = campaign([CaseResult(replace(verdict, laws=laws))] * 2, said="odd", left_out={})
    golden(PageText(made).lines, lines="^Of ")
