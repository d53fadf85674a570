"""The few lines that a reader gets first: what they say, and that there are never more."""

from dataclasses import replace

import pytest

from pipeproof.core.cause import KINDS, Cause, Cell, Cells, OwnLine
from pipeproof.core.mismatch import Mismatch, Size
from pipeproof.core.observe.stack import Line
from pipeproof.core.reason import Reason
from pipeproof.core.text import LISTED, brief, cause_sentence, details
from pipeproof.core.verdict import LawResult, Verdict
from pipeproof.worlds.rank_report import Ending, RankFailed, RankReport, of_failure
from tests.support.golden import golden

LAWS = (
    LawResult("loss", "pass", 8, 8),
    LawResult("gradient", "fail", 8, 4, 4, worst=0.5, floor=1e-7),
    LawResult("boundaries", "unknown", 4, 4, note="one tensor was not compared", reasons=(Reason.HIDDEN,)),
    LawResult("grad-norm", "not observed", note="no rank reports a norm"),
)
LINES = tuple(OwnLine("0B1", Line(f"step_{k}.py", 47 + k, "backward", "y.backward(received)")) for k in range(3))
DROPPED = Cause("dropped", rank=0, stage=0, microbatches=(2,), detail="its output gradient came", lines=LINES)
FIRST = Mismatch("gradient", 1, Size((4,), 1.0, factor=0.5, cosine=1.0), Size((4,), 2.0), "tensor", 0, 0, error=0.5)
CELLS = Cells((tuple(Cell(float(m != 2)) for m in range(4)), *([(Cell(1.0),) * 4] * 3)))
FAILED = Verdict("my_step on 2 ranks", "fail", "none", LAWS, (FIRST,), (DROPPED,), cells=CELLS, rerun="pytest t.py")

LONG = " ".join(f"word{k}" for k in range(60))
CROWDED = replace(
    FAILED,
    mismatches=(replace(FIRST, parameter=LONG),) * 9,
    causes=(replace(DROPPED, detail=LONG, parameter=LONG), *(Cause("zero", stage=k) for k in range(9))),
    alternatives=((Cause("scale", stage=1, factor=2.0),),),
    cells=Cells(tuple((Cell(float(k)),) * 30 for k in range(12))),
    stopped=LONG,
    rerun=f'pytest "{LONG}"',
)
HANG = [RankReport(k, Ending.STUCK, "did not finish", waiting="a message", peers=(1 - k,)) for k in range(2)]
CRASH = [
    RankReport(0, Ending.STOPPED, waiting="a barrier"),
    RankReport(1, Ending.RAISED, "ValueError: bad", stack=(Line("my.py", 3, "step", "raise"),)),
]
BLANK = Verdict("my_step on 2 ranks", "unknown", "none", (), rerun="pytest t.py")
VERDICTS = {
    "a fault": FAILED,
    "a fault without a cause": replace(FAILED, causes=(), cells=None, undecided=("stage 1: nothing fits",)),
    "two causes": replace(FAILED, causes=(DROPPED, Cause("scale", stage=1, factor=0.25))),
    "another explanation": replace(FAILED, alternatives=((Cause("scale", stage=1),),)),
    "a pass": Verdict("my_step", "pass", "bitwise", (LAWS[0], LAWS[3])),
    "unknown": replace(FAILED, outcome="unknown", laws=(LAWS[0], LAWS[2]), mismatches=(), causes=(), cells=None),
    "a hang": of_failure(BLANK, RankFailed(HANG)),
    "a crash": of_failure(BLANK, RankFailed(CRASH)),
    "two runs": replace(FAILED, causes=(), cells=None, sides=("A", "B")),
    "crowded": CROWDED,
    "two crowded runs": replace(CROWDED, sides=("A", "B")),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_it_says_what_is_wrong_where_and_what_to_do(name: str) -> None:
    golden(brief(VERDICTS[name]), exact=True)


@pytest.mark.parametrize("name", VERDICTS)
def test_it_has_fourteen_lines_of_a_hundred_columns(name: str) -> None:
    rows = brief(VERDICTS[name]).splitlines()
    assert len(rows) <= 14
    assert [row for row in rows if len(row) > 100 and not row.startswith("  again ")] == []


def test_the_command_is_never_cut() -> None:
    assert f"  again         {CROWDED.replay}" in brief(CROWDED).splitlines()


@pytest.mark.parametrize(
    ("cause", "place"),
    [
        (Cause("zero"), "everywhere"),
        (Cause("zero", rank=1), "rank 1"),
        (Cause("zero", rank=1, stage=2), "stage 2 (rank 1)"),
        (Cause("zero", stages=(0, 2), parameter="w"), "stages 0, 2, w"),
        (Cause("zero", stage=0, microbatches=(1, 3)), "stage 0, microbatches 1, 3"),
        (Cause("zero", stage=0, microbatches=tuple(range(9))), "stage 0"),
    ],
)
def test_a_sentence_begins_with_the_place(cause: Cause, place: str) -> None:
    assert cause_sentence(cause) == f"{place}: {KINDS[cause.kind]}"


def test_details_have_every_law_and_say_how_many_causes_are_left_out() -> None:
    causes = tuple(Cause("zero", stage=k) for k in range(LISTED + 1))
    for count in (LISTED, LISTED + 1):
        golden(details(replace(FAILED, causes=causes[:count])))


def test_a_summary_begins_with_the_users_line() -> None:
    golden(f"{FAILED.summary}\n{VERDICTS['a crash'].summary}")
