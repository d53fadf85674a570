"""Golden texts: a line of the table, the screen of a failure, the summary."""

from dataclasses import replace
from functools import partial

import pytest

from pipeproof.cases.case import Case
from pipeproof.cases.specimens import SPECIMENS
from pipeproof.cases.trial import Named
from pipeproof.commands.catalogue import listing
from pipeproof.commands.schedule_commands import _planned
from pipeproof.core.cause import KINDS, Cause, Cell, Cells, OwnLine, RuledOut, alternatives
from pipeproof.core.verdict import LawResult, Mismatch, Verdict
from pipeproof.pipeline import Times, build
from pipeproof.pipeline.plan import Needs, plan, row
from pipeproof.pipeline.profile import Profile
from pipeproof.reports.columns import header, table
from pipeproof.reports.side_by_side import SideBySide
from pipeproof.reports.table import (
    COLUMNS,
    confusion,
    counts,
    line,
    measured_table,
    pairs_of,
    profile_table,
    summary,
    totals,
)
from pipeproof.worlds.stack import Line
from tests.support.golden import golden
from tests.validation.cases.test_trial import RIGHT, TRIAL

CASE = Case("interleaved", 4, 2, 8, (1,) * 8, model="gpt-tied", seed=3)
LAWS = (
    LawResult("loss", "pass", 32, 32),
    LawResult("presence", "pass", 101, 101),
    LawResult("gradient", "fail", 101, 99, 2, worst=1.0, floor=3e-7),
    LawResult("tied-copies", "not applicable", note="no parameter has copies in several stages"),
    LawResult("grad-norm", "pass", 4, 0, worst=2e-8, floor=1e-8),
    LawResult("second-step", "unknown", note="not judged: operation 1 already disagrees"),
)
FIRST = Mismatch(
    "gradient",
    1,
    found="norm 0",
    due="norm 0.0356646",
    rank=2,
    stage=6,
    parameter="blocks.6.norm_1.weight",
    error=1.0,
    limit=4.2e-6,
)
FAILED = Verdict(str(CASE), "fail", "none", LAWS, (FIRST, *(replace(FIRST, stage=s) for s in range(7))), seconds=1.25)
PASSED = Verdict(str(CASE), "pass", "bitwise", LAWS[:1] * 2 + (LAWS[1],), floor=6e-7, seconds=0.5)


def test_a_failure_is_one_screen_with_where_seen_expected_case_and_replay() -> None:
    golden(FAILED.details)
    assert len(FAILED.details.splitlines()) <= 24


def test_a_cause_comes_first_with_what_was_ruled_out_and_the_bindings() -> None:
    cause = Cause(
        "zero",
        rank=2,
        stage=6,
        parameter="blocks.6.norm_1.weight",
        detail="cleared between the last backward and the norm",
    )
    ruled_out = RuledOut(("wrong-message", "swapped-data"), "every boundary tensor is right", 812)
    named = replace(FAILED, cause=(cause,), ruled_out=(ruled_out,), bindings=CASE.bindings)
    golden(named.details)
    assert len(named.details.splitlines()) <= 24
    told = "stage 0: no mix of the reference's contributions explains these gradients"
    undecided = replace(FAILED, undecided=(told,))
    golden(undecided.details)


def test_causes_that_hold_together_and_explanations_that_exclude_each_other_are_told_apart() -> None:
    one, two = Cause("dropped", stage=1, microbatches=(3,)), Cause("doubled", stage=2, microbatches=(0, 4), rank=1)
    kinds = ["zero", "missing", "sign", "scale"]
    open_ = replace(one, instead=tuple(replace(one, kind=kind) for kind in kinds))
    first, *others = alternatives([open_, two])
    assert first == (one, two)
    assert [cause.kind for cause, _ in others] == kinds
    text = replace(FAILED, cause=first, alternatives=tuple(others)).details.splitlines()
    assert [line.split(":")[0].strip() for line in text[1:9:2]] == [
        "cause     dropped",
        "and       doubled",
        "or        zero",
        "and       doubled",
    ]
    golden(text[2])
    golden(text[4])
    after = text.index("  or        1 more explanations") + 1
    golden(text[after])


def test_lines_of_the_users_own_code_are_told_once() -> None:
    ran, before = Line("loop.py", 7, "step", "y.backward()"), Line("loop.py", 3, "run", "step()")
    one = Cause("dropped", stage=1, lines=(OwnLine("1B0", ran), OwnLine("from", before)))
    golden(replace(FAILED, cause=(one, replace(one, stage=0, lines=one.lines[:1]))).details, exact=True)


def test_causes_that_the_screen_has_no_room_for_are_counted() -> None:
    causes = tuple(Cause("dropped", stage=stage) for stage in range(6))
    text = replace(FAILED, cause=causes).details.splitlines()
    assert sum(line.startswith(("  cause", "  and  ")) for line in text) == 4
    assert "  and       3 more" in text


def test_the_coefficients_are_a_table_of_stages_and_microbatches() -> None:
    right, unknown = Cell(1.0), Cell(None)
    rows = ((right, Cell(0.0), Cell(0.0, ((1, 1.0),)), Cell(0.0, (), 1.0)), (right, Cell(2.0), Cell(0.25), unknown))
    named = replace(FAILED, cause=(Cause("dropped", stage=0),), cells=Cells(rows))
    golden("\n".join(named.details.splitlines()[4:8]))
    assert not Cells(rows).right
    assert named.as_dict()["cells"] == {
        "rows": tuple(
            tuple({"own": cell.own, "others": cell.others, "behind": cell.behind} for cell in row) for row in rows
        ),
        "apart": (),
    }


def test_the_table_names_parameters_that_have_another_number_than_their_stage() -> None:
    rows = ((Cell(1.0), Cell(0.0)), (Cell(1.0), Cell(1.0)), (Cell(None), Cell(None)))
    names = ("2.a", "2.b", "2.c", "2.d", "2.e", "2.f")
    golden("\n".join(Cells(rows, ((), names, ("4.a",))).lines()))


def test_of_many_microbatches_the_table_shows_the_wrong_ones_and_counts_the_rest() -> None:
    row = tuple(Cell(0.0 if m in (7, 40) else 1.0) for m in range(64))
    golden("\n".join(Cells((row,)).lines()))


def test_nothing_is_ruled_out_by_what_was_not_compared() -> None:
    with pytest.raises(AssertionError, match="not compared"):
        RuledOut(("dropped",), "every gradient is right", 0)
    golden(str(RuledOut((), "every stage began with the model's parameters", 12)))


def test_the_table() -> None:
    sound = (*LAWS[:2], LawResult("gradient", "pass", 101, 101), LAWS[4])
    passed = replace(FAILED, verdict="pass", tier="fp32", laws=sound)
    table = "\n".join([header(COLUMNS, None), line(CASE, FAILED), line(CASE, passed)])
    golden(table)
    assert max(map(len, table.splitlines())) <= 120


def test_a_step_that_cannot_be_compared_has_a_line_without_numbers() -> None:
    verdict = Verdict(str(CASE), "unknown", "none", (LawResult("comparable", "unknown", note="a call too many"),))
    cells = line(CASE, verdict).split()
    assert cells[-9:-3] == ["-", "-", "none", "-", "-", "-"]


def test_the_summary_counts() -> None:
    golden(summary([FAILED, PASSED, PASSED]))
    golden(summary([FAILED]))


def test_an_unknown_verdict_says_why() -> None:
    unknown = Verdict("c", "unknown", "none", (LAWS[0], LAWS[5]))
    golden(unknown.details)


def test_a_pass_says_how_much_was_compared() -> None:
    golden(PASSED.details)


def test_what_was_left_out_is_counted() -> None:
    golden(summary([]))
    golden(summary([], left_out=2))


WRONG, UNKNOWN = Named("sign", False, False, 0.75), Named(None, False, False, 0.5)


PROFILES = [Profile(0, 0.1, 0.05, 0.01, 0.04), Profile(1, 0.1, 0.1, 0.0, 0.0)]


def test_a_profile_is_a_line_per_rank_with_shares() -> None:
    head, first, second = (
        line.split() for line in profile_table([Profile(0, 0.1, 0.05, 0.01, 0.02), PROFILES[1]]).splitlines()
    )
    assert head == ["rank", "step", "compute", "communication", "idle", "other"]
    golden(" ".join(first), exact=True)
    assert "100.0%" in second


def test_measured_beside_simulated_is_two_lines_per_rank() -> None:
    rows = [line.split() for line in measured_table(PROFILES, [Profile(0, 0.08, 0.06, 0.0, 0.02)] * 2).splitlines()]
    assert rows[0] == ["rank", "makespan", "compute", "communication", "idle"]
    assert [row[0] for row in rows[1:]] == ["0", "simulated", "1", "simulated"]
    assert rows[1][2:7] == ["100.0", "ms", "50.0", "ms", "50.0%"]
    assert rows[2][1:6] == ["80.0", "ms", "60.0", "ms", "75.0%"]


PAIRS = [("scale", None), ("scale", "scale"), ("scale", "sign"), ("scale", "sign"), ("dropped", "dropped")]
NARROW = {
    "profile": (partial(profile_table, PROFILES), ["rank", "idle"]),
    "measured": (partial(measured_table, PROFILES, PROFILES), ["rank", "idle"]),
    "confusion": (partial(confusion, [*PAIRS, *(("scale", kind) for kind in KINDS)]), ["planted", "named"]),
    "specimens": (lambda width: listing(SPECIMENS, width=width), ["layernor"]),
    "plan": (lambda width: table(_planned(), list(map(row, plan(Needs(4, 8)))), width), ["schedule", "time"]),
    "beside": (
        SideBySide.of([build(name, ranks=4, microbatches=8) for name in ("interleaved", "dualpipev")], Times()).text,
        ["memory"],
    ),
}


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("width", [20, 40, 80, 120])
def test_no_table_is_wider_than_the_terminal_and_what_matters_stays(name: str, width: int) -> None:
    made, words = NARROW[name]
    whole, shown = made(None), made(width)
    lines = shown.splitlines()[: -1 if name == "beside" else None]  # the last of which is a sentence
    assert max(map(len, lines)) <= width
    assert width < 40 or all(word in shown for word in words)
    assert width < 40 or set(shown.split()) <= set(whole.split()), "whole words"
    assert shown == whole or max(map(len, whole.splitlines())) > width


def test_of_planted_kinds_the_table_counts_what_they_were_named() -> None:
    golden(confusion(PAIRS))
    assert "otherwise" not in confusion(PAIRS[-1:]), "an empty column is none"
    assert confusion([]) == ""


def test_totals_count_caught_right_located_unknown_and_wrong_with_times() -> None:
    trials = [TRIAL, replace(TRIAL, recorded=WRONG, laws=()), replace(TRIAL, recorded=UNKNOWN, final=RIGHT)]
    golden(totals(trials, "recorded"), exact=True)
    golden(totals(trials, "final"))
    golden(counts([]))


def test_a_kind_that_will_do_counts_as_the_planted_one() -> None:
    trials = [replace(TRIAL, recorded=replace(RIGHT, kind="rounded")), replace(TRIAL, recorded=WRONG)]
    assert list(pairs_of(trials, "recorded")) == [("scale", "scale"), ("scale", "sign")]
    assert list(pairs_of(trials, "final")) == []
