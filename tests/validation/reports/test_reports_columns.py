"""Tables and grids fit: what matters least goes first, and no line is longer than the terminal is wide."""

import pytest

from pipeproof.pipeline import build
from pipeproof.pipeline.grid import grid
from pipeproof.reports.columns import Column, Layout, folded, in_pieces, shortened, table, wrapped
from pipeproof.reports.table import COLUMNS
from tests.support.golden import golden

HEADER = Layout.of(COLUMNS, None).header
NAMED = (Column("name", 8, least=4, gap=0), Column("why", 9, drop=1), Column("n", 3, right=True, drop=2))


def test_the_least_important_column_goes_first() -> None:
    assert Layout.of(NAMED, None).header == "name     why         n"
    assert Layout.of(NAMED, 22).row(["one", "because", "7"]) == "one      because     7"
    assert Layout.of(NAMED, 19).row(["one", "because", "7"]) == "one   because     7", "it is narrower first"
    assert Layout.of(NAMED, 17).row(["one", "because", "7"]) == "one     because"
    assert Layout.of(NAMED, 6).row(["sixteen", "because", "7"]) == "sixte…"


@pytest.mark.parametrize("width", range(17, 140))
def test_a_line_is_never_longer_than_the_terminal(width: int) -> None:
    header = Layout.of(COLUMNS, width).header
    assert len(header) <= width
    assert "verdict" in header
    assert header.startswith("schedule")
    assert width < len(HEADER) or header == HEADER


def test_of_twenty_columns_the_outcome_has_its_own() -> None:
    cells = ["interleaved", *["x"] * 12, "unknown", "1.0 s"]
    assert Layout.of(COLUMNS, 20).row(cells) == "interleaved  unknown"


def test_a_file_and_a_pipe_have_all() -> None:
    long = ",".join("2" * 16)
    cells = ["a/schedule/of/mine.csv", *["x"] * 5, long, *["x"] * 6, "unknown", "1.0 s"]
    assert Layout.of(COLUMNS, None).row(cells).split() == [*cells[:-1], "1.0", "s"]
    assert len(Layout.of(COLUMNS, len(HEADER)).row(cells)) <= len(HEADER)


def test_a_table_is_as_wide_as_what_is_in_it_and_empty_columns_are_none() -> None:
    columns = [Column("a", 1, gap=0), Column("", 0, gap=2, least=3, drop=1), Column("c", 1, right=True, gap=2)]
    golden(table(columns, [["x", "", "12"]]))
    rows = [["x", "too long", "12"]]
    golden(table(columns, rows).splitlines()[1])
    golden(table(columns, rows, 12).splitlines()[1])
    assert table(columns, rows, 6).splitlines()[1] == "x  12"


def test_what_is_cut_says_so() -> None:
    assert (shortened("four", 4), shortened("fives", 4), shortened("x", None)) == ("four", "fiv…", "x")


def test_a_long_grid_is_in_pieces_that_say_where_they_begin() -> None:
    whole = grid(build("1f1b", ranks=2, microbatches=4))
    assert in_pieces(whole, None) == in_pieces(whole, 200) == whole
    pieces = in_pieces(whole, 30).splitlines()
    assert all(len(line) <= 30 for line in pieces)
    golden("\n".join(pieces[:3]))
    rows = ["".join(line.partition(" | ")[2] + " " for line in pieces[k::3]).split() for k in (1, 2)]
    assert rows == [line.partition(" | ")[2].split() for line in whole.splitlines()], "nothing is lost"


def test_a_sentence_in_the_place_of_a_grid_stays() -> None:
    golden(in_pieces("(cannot draw: 1.5 is no whole unit of time)", 20))


FOLDED = [
    Column("layout", gap=0),
    Column("GiB", right=True, gap=2, fold=True),
    Column("time", right=True, gap=2),
    Column("because", gap=2, fold=True),
]
ROWS = [["pp 2, dp 4", "65.9", "27.5 s", "it fits"], ["one device", "", "", "it does not"]]


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (None, ["layout       GiB    time  because", "pp 2, dp 4  65.9  27.5 s  it fits"]),
        (30, ["layout       GiB    time", "  because", "pp 2, dp 4  65.9  27.5 s", "  it fits"]),
        (28, ["layout       GiB    time", "  because"]),
        (23, ["layout", "   GiB    time", "  because", "pp 2, dp 4", "  65.9  27.5 s", "  it fits"]),
        (10, ["layout", "   GiB", "    time", "  because", "pp 2, dp 4", "  65.9", "  27.5 s", "  it fits"]),
        (9, ["layout", "   GiB", "    time", "  because", "pp 2, dp…"]),
    ],
)
def test_what_a_line_has_no_room_for_goes_to_the_next(width: int | None, lines: list[str]) -> None:
    assert folded(FOLDED, ROWS, width).splitlines()[: len(lines)] == lines


def test_a_line_of_a_row_with_nothing_on_it_is_none() -> None:
    assert folded(FOLDED, ROWS, 23).splitlines()[-2:] == ["one device", "  it does not"]
    assert "GiB" not in folded(FOLDED, [["one device", "", "", "it does not"]], 23)


def test_a_sentence_is_wrapped_between_words() -> None:
    said = "  saves   all that pp=2,zero-3=2 needs"
    assert wrapped(said, 28, indent=10).splitlines() == [
        "  saves   all that",
        "          pp=2,zero-3=2",
        "          needs",
    ]
    assert wrapped(said, None, indent=10) == said
    assert wrapped(said, 12, indent=10) == said
