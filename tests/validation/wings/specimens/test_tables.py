"""Tables of specimens: a line for each, also in a narrow terminal, and what they were named."""

from dataclasses import replace

from pipeproof.wings.specimens import SPECIMENS
from pipeproof.wings.specimens.tables import IN_SIMULATION_COLUMNS, confusion, counts, line, listing, pairs_of, totals
from pipeproof.wings.specimens.trial import Named
from tests.support.golden import golden
from tests.validation.wings.specimens.test_trial import RIGHT, TRIAL

WRONG, UNKNOWN = Named("sign", False, False, 0.75), Named(None, False, False, 0.5)
PAIRS = [("scale", None), ("scale", "scale"), ("scale", "sign"), ("scale", "sign"), ("dropped", "dropped")]


def test_a_line_says_what_was_caught_named_and_placed() -> None:
    unknown = replace(TRIAL, recorded=Named(None, False, False, 0.1), final=RIGHT)
    missed = replace(TRIAL, laws=("grad-norm",), recorded=Named("sign", False, False, 0.1))
    golden("\n".join(map(line, (TRIAL, unknown, missed, replace(TRIAL, laws=())))), exact=True)


def test_in_a_narrow_terminal_columns_are_left_out_before_names_are_cut() -> None:
    kind = "swapped-activations"
    long = replace(TRIAL, specimen=max(SPECIMENS, key=len), planted=kind, recorded=Named(kind, True, True, 0.1))
    for width in range(51, 150):
        text = line(long, width)
        assert len(text) <= width
        assert text.startswith(f"{long.specimen} ")
        assert text.split()[-1] in (kind, "right", "s", "-"), "nothing is cut"
    assert line(long, 51).split() == [long.specimen, kind], "what was planted, and what it was taken for"
    assert len(line(long, 20)) == 20


def test_a_line_of_simulated_ranks_has_the_transport_and_the_seed() -> None:
    golden(line(replace(TRIAL, transport="pair", seed="7"), columns=IN_SIMULATION_COLUMNS), exact=True)


def test_the_list_has_a_line_for_each_specimen() -> None:
    lines = listing(SPECIMENS).splitlines()
    assert [text.split()[0] for text in lines] == list(SPECIMENS)
    (alone,) = listing(["tied-not-reduced"]).splitlines()
    one = SPECIMENS["tied-not-reduced"]
    for word in ("tied tE,mC", one.fault.kind, one.smallest, one.summary, one.origin):
        assert word in alone


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
