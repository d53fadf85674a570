"""Tables of planted against named kinds, and the counts under them."""

from dataclasses import replace

from tests.validation.cases.test_trial import RIGHT, TRIAL
from validation.cases.trial import Named
from validation.reports.confusion import counts, matrix, pairs_of, totals

WRONG, UNKNOWN = Named("sign", False, False, 0.75), Named(None, False, False, 0.5)


def test_the_matrix_has_what_is_right_on_its_diagonal() -> None:
    pairs = [("scale", None), ("scale", "scale"), ("scale", "sign"), ("scale", "sign"), ("dropped", "dropped")]
    rows = [row.split() for row in matrix(pairs).splitlines()]
    assert rows[0] == ["planted", "1", "2", "3", "?"]
    assert rows[1] == ["1", "dropped", "1", ".", ".", "."]
    assert rows[2] == ["2", "scale", ".", "1", "2", "1"]
    assert rows[3] == "3 sign (named, never planted)".split()
    assert matrix([]) == ""


def test_totals_count_caught_right_located_unknown_and_wrong_with_times() -> None:
    trials = [TRIAL, replace(TRIAL, recorded=WRONG, laws=()), replace(TRIAL, recorded=UNKNOWN, final=RIGHT)]
    assert totals(trials, "recorded") == (
        "3 tried: 2 caught; of 3 diagnosed 1 named right (33.3 %), 1 located too (33.3 %), 1 unknown (33.3 %), "
        "1 wrong (33.3 %); a diagnosis took 0.50 s, at most 0.75 s"
    )
    assert totals(trials, "final").startswith("3 tried: 2 caught; of 1 diagnosed 1 named right (100.0 %)")
    assert counts([]) == "of 0 diagnosed 0 named right, 0 located too, 0 unknown, 0 wrong"


def test_a_kind_that_will_do_counts_as_the_planted_one() -> None:
    trials = [replace(TRIAL, recorded=replace(RIGHT, kind="rounded")), replace(TRIAL, recorded=WRONG)]
    assert list(pairs_of(trials, "recorded")) == [("scale", "scale"), ("scale", "sign")]
    assert list(pairs_of(trials, "final")) == []
