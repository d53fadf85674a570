"""Rows as arrays and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.columns import Columns

numbers = st.integers(0, 999_999_999)
rows_of_actions = st.lists(st.builds(Action, numbers, st.sampled_from(Kind), numbers), max_size=5).map(tuple)
tables = st.lists(rows_of_actions, max_size=4)


@given(tables)
def test_rows_come_back_as_they_were(rows: list[tuple[Action, ...]]) -> None:
    columns = Columns.of(rows)
    assert columns.rows() == tuple(rows)
    assert columns == Columns.of(columns.rows())
    assert hash(columns) == hash(Columns.of(rows))
    cells = [(rank, slot) for rank, row in enumerate(rows) for slot in range(len(row))]
    assert [columns.cell(entry) for entry in range(len(columns))] == cells
    assert [columns.action(entry) for entry in range(len(columns))] == [rows[rank][slot] for rank, slot in cells]


def test_columns_differ_where_rows_do() -> None:
    one, other = ([[Action(0, Kind.FORWARD, 0)], []], [[], [Action(0, Kind.FORWARD, 0)]])
    assert Columns.of(one) != Columns.of(other)
    assert Columns.of(one) != one


@pytest.mark.parametrize(("keep", "left"), [([0, 2], ["0F0", "1F0"]), ([1], ["0B0"]), ([], [])])
def test_a_part_keeps_every_row(keep: list[int], left: list[str]) -> None:
    rows = [[Action.parse("0F0"), Action.parse("0B0")], [], [Action.parse("1F0")]]
    part = Columns.of(rows).take(Columns.of(rows).is_kind() | [entry in keep for entry in range(3)])
    assert len(part.rows()) == 3
    assert [str(action) for row in part.rows() for action in row] == left
