"""Tables and grids fit: what matters least goes first, and no line is longer than the terminal is wide."""

import pytest

from pipeproof.pipeline import build
from pipeproof.pipeline.text_grid import grid
from pipeproof.reports.columns import Column, header, in_pieces, row, table
from pipeproof.reports.table import COLUMNS
from tests.support.golden import golden

HEADER = header(COLUMNS, None)
NAMED = (Column("name", 8), Column("why", 9, drop=1), Column("n", 3, right=True, drop=2))


@pytest.mark.parametrize(
    ("name", "width", "line"),
    [
        ("one", None, "one      because     7"),
        ("one", 22, "one      because     7"),
        ("one", 21, "one      because"),
        ("one", 17, "one"),
        ("sixteen", 6, "sixte…"),
        ("a/schedule.csv", 22, "a/sched… because     7"),
    ],
)
def test_the_least_important_column_goes_before_any_is_cut(name: str, width: int | None, line: str) -> None:
    assert row(NAMED, [name, "because", "7"], width) == line


@pytest.mark.parametrize("width", range(17, 140))
def test_a_line_is_never_longer_than_the_terminal(width: int) -> None:
    shown = header(COLUMNS, width)
    assert len(shown) <= width
    assert width < 21 or "verdict" in shown
    assert shown.startswith("sch")
    assert width < len(HEADER) or shown == HEADER


def test_of_twenty_columns_the_outcome_has_its_own() -> None:
    cells = ["interleaved", *["x"] * 12, "unknown", "1.0 s"]
    assert row(COLUMNS, cells, 21) == "interleaved   unknown"


def test_a_file_and_a_pipe_have_all() -> None:
    long = ",".join("2" * 16)
    cells = ["a/schedule/of/mine.csv", *["x"] * 5, long, *["x"] * 6, "unknown", "1.0 s"]
    assert row(COLUMNS, cells, None).split() == [*cells[:-1], "1.0", "s"]
    assert len(row(COLUMNS, cells, len(HEADER))) <= len(HEADER)


def test_a_table_is_as_wide_as_its_cells() -> None:
    columns = [Column("a"), Column("", drop=1), Column("c", right=True)]
    golden(table(columns, [["x", "", "12"]]))
    rows = [["x", "too long", "12"]]
    golden(table(columns, rows).splitlines()[1])
    golden(table(columns, rows, 12))
    assert table(columns, rows, 6).splitlines()[1] == "x  12"
    assert table([Column(""), Column("")], rows) == "x  too long"
    assert table([Column("")], [["[bold]x[/bold] :smile:"]]) == "[bold]x[/bold] :smile:"


ROWS = [["pp 2, dp 4", "65.9", "27.5 s", "it fits"], ["one device", "", "", "it does not"]]


@pytest.mark.parametrize("width", [None, 40, 33, 30])
def test_text_without_room_takes_several_lines(width: int | None) -> None:
    columns = [Column("layout"), Column("GiB", right=True), Column("time", right=True), Column("because")]
    shown = table(columns, ROWS, width)
    assert sorted(shown.split()) == sorted(table(columns, ROWS).split())
    assert "65.9  27.5 s" in shown
    assert max(map(len, shown.splitlines())) <= (width or 40)


def test_a_long_grid_is_in_pieces() -> None:
    whole = grid(build("1f1b", ranks=2, microbatches=4))
    assert in_pieces(whole, None) == in_pieces(whole, 200) == whole
    pieces = in_pieces(whole, 30).splitlines()
    assert all(len(line) <= 30 for line in pieces)
    golden("\n".join(pieces[:3]))
    rows = ["".join(line.partition(" | ")[2] + " " for line in pieces[k::3]).split() for k in (1, 2)]
    assert rows == [line.partition(" | ")[2].split() for line in whole.splitlines()], "nothing is lost"
    assert max(map(len, in_pieces(whole, 9).splitlines())) <= 9
    golden(in_pieces("(cannot draw: 1.5 is no whole unit of time)", 20))
