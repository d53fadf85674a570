"""What became of a row is kept as values, and what may not become of it is told."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import corpus
import pytest
import truth
from corpus import Transition, Values, transitions
from truth_check import Checked

from pipeproof.core.cause import Cause
from pipeproof.core.verdict import LawResult, Mismatch, Verdict
from pipeproof.whitebox import WhiteBox
from tests.support.golden import golden
from tests.support.sweeps import SWEEP

RIGHT = Values("rights | watched | right: naive", False, "pass", "silent", bitwise=True)
CAUSES = (("zero", 1, 1, (), "a"),)
CAUGHT = Values("faults | final | a fault", True, "fail", "right", failed=("gradient",), causes=CAUSES)
OPEN = replace(CAUGHT, outcome="unknown", naming="unknown", causes=())
OWN = replace(RIGHT, row="cases | watched | gpipe r2")

# before, what differs after, what the transition is, and whether it is forbidden
CHANGES: dict[str, tuple[Values, dict[str, Any], str, bool]] = {
    "caught passes": (CAUGHT, {"outcome": "pass", "naming": "wrong"}, "fail -> pass", True),
    "open passes": (OPEN, {"outcome": "pass"}, "unknown -> pass", True),
    "caught is open": (CAUGHT, {"outcome": "unknown"}, "fail -> unknown", False),
    "open is caught": (OPEN, {"outcome": "fail"}, "unknown -> fail", False),
    "right fails": (RIGHT, {"outcome": "fail", "naming": "alarm"}, "pass -> fail", True),
    "right raises": (RIGHT, {"outcome": "raised", "naming": "raised"}, "pass -> raised", True),
    "right is open": (RIGHT, {"outcome": "unknown", "naming": "needless"}, "pass -> unknown", False),
    "our own is open": (OWN, {"outcome": "unknown", "naming": "needless"}, "pass -> unknown", True),
    "our own is no longer bitwise": (OWN, {"bitwise": False}, "no longer bits", True),
    "named wrong": (CAUGHT, {"naming": "wrong"}, "named wrong", False),
    "named right": (replace(CAUGHT, naming="elsewhere"), {"naming": "right"}, "named right", False),
    "at another place": (CAUGHT, {"place": (0, 0, None, "a")}, "other values", False),
    "a sentence is false": (CAUGHT, {"false": 1}, "false sentences", True),
}


@pytest.mark.parametrize(("before", "after", "what", "forbidden"), CHANGES.values(), ids=CHANGES)
def test_what_may_not_become_of_a_row(before: Values, after: dict[str, Any], what: str, forbidden: bool) -> None:
    found = list(transitions({before.row: before}, [replace(before, **after)]))
    assert [(one.what, bool(one.forbidden)) for one in found] == [(what, forbidden)]


def test_what_stays_and_what_is_new_is_no_transition() -> None:
    new = replace(CAUGHT, row="faults | final | another")
    assert list(transitions({CAUGHT.row: CAUGHT}, [replace(CAUGHT, why="in other words"), new])) == []
    drawn = replace(RIGHT, row="fuzz | watched | gpipe r2")
    assert list(transitions({}, [drawn])) == []
    assert [one.what for one in transitions({}, [replace(drawn, outcome="fail")])] == ["pass -> fail"]


@pytest.mark.parametrize("one", [RIGHT, CAUGHT, OPEN, replace(CAUGHT, place=(1, None, 3, "a"), false=2, why="so")])
def test_a_row_is_read_as_it_was_written(one: Values, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{RIGHT.line()}\n{one.line()}\n")
    assert corpus.read(path)[one.row] == one


def test_a_verdict_gives_its_values() -> None:
    laws = LawResult("gradient", "fail", 4, 3, 1), LawResult("loss", "unknown"), LawResult("presence", "pass", 1, 1)
    cause = Cause("dropped", rank=1, stage=1, microbatches=(2,))
    verdict = Verdict("", "fail", "none", laws, (Mismatch("gradient", 1, rank=1, parameter="a"),), (cause,))
    found = Values.of("p | watched | t", faulty=True, verdict=verdict, checked=Checked("fail", "right"))
    assert (found.failed, found.undecided, found.place) == (("gradient",), ("loss",), (1, None, None, "a"))
    assert found.causes == (("dropped", 1, 1, (2,), None),)
    raised = truth.row("p", "t", True, truth.RIGHT, ValueError("no")).values
    assert (raised.row, raised.outcome, raised.why) == ("p | watched | t", "raised", "ValueError: no")


def test_the_command_ends_with_1_where_a_transition_is_forbidden(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{RIGHT.line()}\n{CAUGHT.line()}\n")
    for after, status in ((RIGHT, 0), (replace(RIGHT, outcome="fail"), 1)):
        assert truth.compare(str(path), {after.row: after}, truth.Terminal()) == status
    golden(capsys.readouterr().out)


def test_the_baseline_has_rows_of_every_part() -> None:
    every = corpus.read(corpus.BASELINE)
    assert {one.part for one in every.values()} | {"fuzz"} == {*truth.PARTS}
    assert len(every) > 1500


# One row in so many, of parts that are quick: a campaign of `ci/truth --against baseline` has all of them.
EVERY = {"rights": 60, "faults": 60, "mixtures": 90, "functional": 60, "async": 60, "narrow": 40, "cases": 20}


@pytest.mark.parametrize("part", [pytest.param(part, marks=() if part != "mixtures" else SWEEP) for part in EVERY])
def test_nothing_forbidden_became_of_a_sample(part: str, whitebox: WhiteBox) -> None:
    before = corpus.read(corpus.BASELINE)
    runs = list(truth.tries([part], [""], whitebox.world))[:: EVERY[part]]
    found = [one.values for run in runs for one in run.rows()]
    assert found
    changes: list[Transition] = list(transitions(before, found))
    assert [str(one) for one in changes if one.forbidden] == []
