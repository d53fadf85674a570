"""Golden texts: a line of the table, the screen of a failure, the summary."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from pipeproof.commands.schedule_commands import PLAN_COLUMNS
from pipeproof.core.cause import KINDS, Cause, Cell, Cells, OwnLine, RuledOut, alternatives
from pipeproof.core.observe.stack import Line
from pipeproof.core.verdict import LawResult, Mismatch, Verdict
from pipeproof.own.case import Case
from pipeproof.pipeline import Times, build
from pipeproof.pipeline.plan import Needs, plan, row
from pipeproof.pipeline.trace import Profile
from pipeproof.reports.columns import header, table
from pipeproof.reports.side_by_side import SideBySide
from pipeproof.reports.table import COLUMNS, line, profile_table, summary, table_of_times
from pipeproof.wings.specimens import SPECIMENS
from pipeproof.wings.specimens.tables import confusion, listing
from tests.support.golden import golden

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
    observed="norm 0",
    expected="norm 0.0356646",
    rank=2,
    stage=6,
    parameter="blocks.6.norm_1.weight",
    error=1.0,
    limit=4.2e-6,
)
FAILED = Verdict(str(CASE), "fail", "none", LAWS, (FIRST, *(replace(FIRST, stage=s) for s in range(7))), seconds=1.25)
PASSED = Verdict(str(CASE), "pass", "bitwise", LAWS[:1] * 2 + (LAWS[1],), floor=6e-7, seconds=0.5)


def failed(*causes: Cause, **more: Any) -> Verdict:
    return replace(FAILED, causes=causes, **more)


ZERO = Cause("zero", 2, 6, parameter="blocks.6.norm_1.weight", detail="cleared between the last backward and the norm")
RIGHT_BOUNDARIES = RuledOut(("wrong-message", "swapped-data"), "every boundary tensor is right", 812)
ONE, TWO = Cause("dropped", stage=1, microbatches=(3,)), Cause("doubled", stage=2, microbatches=(0, 4), rank=1)
OPEN = replace(ONE, instead=tuple(replace(ONE, kind=kind) for kind in ("zero", "missing", "sign", "scale")))
TOGETHER, *OTHERS = alternatives([OPEN, TWO])
RAN = Line("loop.py", 7, "step", "y.backward()"), Line("loop.py", 3, "run", "step()")
OWN = Cause("dropped", stage=1, lines=(OwnLine("1B0", RAN[0]), OwnLine("from", RAN[1])))
ONCE, NEVER = Cell(1.0), Cell(0.0)
ROWS = (
    (ONCE, NEVER, Cell(0.0, ((1, 1.0),)), Cell(0.0, (), 1.0)),
    (ONCE, Cell(2.0), Cell(0.25), Cell(None)),
)
PARAMETERS = ("2.a", "2.b", "2.c", "2.d", "2.e", "2.f")
APART = Cells(((ONCE, NEVER), (ONCE, ONCE), (Cell(None), Cell(None))), ((), PARAMETERS, ("4.a",)))
MANY = Cells((tuple(NEVER if m in (7, 40) else ONCE for m in range(64)),))
SCREENS = {
    "failure": FAILED,
    "cause": failed(ZERO, ruled_out=(RIGHT_BOUNDARIES,), bindings=CASE.bindings),
    "undecided": failed(undecided=("stage 0: no mix of the reference's contributions explains these gradients",)),
    "together and apart": failed(*TOGETHER, alternatives=tuple(OTHERS)),
    "own lines": failed(OWN, replace(OWN, stage=0, lines=OWN.lines[:1])),
    "many causes": failed(*(Cause("dropped", stage=stage) for stage in range(6))),
    "coefficients": failed(Cause("dropped", stage=0), cells=Cells(ROWS)),
    "parameters apart": failed(Cause("dropped", stage=0), cells=APART),
    "many microbatches": failed(Cause("dropped", stage=0), cells=MANY),
    "unknown": Verdict("c", "unknown", "none", (LAWS[0], LAWS[5])),
    "pass": PASSED,
}


@pytest.mark.parametrize("name", SCREENS)
def test_the_screen_of_a_verdict(name: str) -> None:
    text = SCREENS[name].details
    golden(text, exact=True)
    assert len(text.splitlines()) <= (24 if len(SCREENS[name].causes) < 2 else 32)


def test_cells_are_data() -> None:
    rows = tuple(tuple({"own": cell.own, "others": cell.others, "behind": cell.behind} for cell in row) for row in ROWS)
    assert SCREENS["coefficients"].as_dict()["cells"] == {"rows": rows, "apart": ()}
    assert not Cells(ROWS).right


def test_nothing_is_ruled_out_without_comparisons() -> None:
    with pytest.raises(AssertionError, match="not compared"):
        RuledOut(("dropped",), "every gradient is right", 0)
    golden(str(RuledOut((), "every stage began with the model's parameters", 12)))


def test_the_table() -> None:
    sound = (*LAWS[:2], LawResult("gradient", "pass", 101, 101), LAWS[4])
    passed = replace(FAILED, outcome="pass", tier="fp32", laws=sound)
    bare = Verdict(str(CASE), "unknown", "none", (LawResult("comparable", "unknown", note="a call too many"),))
    table = "\n".join([header(COLUMNS, None), *(line(CASE, one) for one in (FAILED, passed, bare))])
    golden(table)
    assert max(map(len, table.splitlines())) <= 120


def test_the_summary_counts() -> None:
    golden("\n".join([summary([FAILED, PASSED, PASSED]), summary([FAILED]), summary([]), summary([], left_out=2)]))


PROFILES = [Profile(0, 0.1, 0.05, 0.01, 0.04), Profile(1, 0.1, 0.1, 0.0, 0.0)]


def test_times_are_a_line_per_rank_and_two_beside_a_simulation() -> None:
    golden(profile_table([Profile(0, 0.1, 0.05, 0.01, 0.02), PROFILES[1]]), exact=True)
    golden(table_of_times(PROFILES, [Profile(0, 0.08, 0.06, 0.0, 0.02)] * 2), exact=True)


NARROW = {
    "profile": (partial(profile_table, PROFILES), ["rank", "idle"]),
    "measured": (partial(table_of_times, PROFILES, PROFILES), ["rank", "idle"]),
    "confusion": (partial(confusion, [("scale", kind) for kind in (None, *KINDS)]), ["planted", "named"]),
    "specimens": (lambda width: listing(SPECIMENS, width=width), ["layernor"]),
    "plan": (lambda width: table(PLAN_COLUMNS, list(map(row, plan(Needs(4, 8)))), width), ["schedule", "time"]),
    "beside": (
        SideBySide.of([build(name, ranks=4, microbatches=8) for name in ("interleaved", "dualpipev")], Times()).text,
        ["memory"],
    ),
}


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("width", [20, 40, 80, 120])
def test_no_table_is_wider_than_the_terminal(name: str, width: int) -> None:
    made, words = NARROW[name]
    whole, shown = made(None), made(width)
    lines = shown.splitlines()[: -1 if name == "beside" else None]  # the last of which is a sentence
    assert max(map(len, lines)) <= width
    assert width < 40 or all(word in shown for word in words)
    assert width < 40 or set(shown.split()) <= set(whole.split()), "whole words"
    assert shown == whole or max(map(len, whole.splitlines())) > width
