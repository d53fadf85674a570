"""What needs what, one by one and for all actions at once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeproof.pipeline.action import Action, Kind
from pipeproof.pipeline.columns import Columns
from pipeproof.pipeline.dataflow import NEVER, NONE, Product, flow, need_of, product_of, stuck, suppliers
from pipeproof.pipeline.schedule import ScheduleError
from pipeproof.pipeline.schedules import build
from tests.support.golden import golden


def rows(*texts: str) -> list[list[Action]]:
    return [[Action.parse(cell) for cell in text.split()] for text in texts]


OUTPUTS, FLOWS = ([Product(stage, kind, 3) for stage in range(3)] for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT))


@pytest.mark.parametrize(
    ("text", "need", "product"),
    [
        ("0F3", None, OUTPUTS[0]),
        ("1F3", OUTPUTS[0], OUTPUTS[1]),
        ("2F3", OUTPUTS[1], OUTPUTS[2]),
        ("0B3", FLOWS[1], FLOWS[0]),
        ("1I3", FLOWS[2], FLOWS[1]),
        ("2B3", None, FLOWS[2]),
        ("2I3", None, FLOWS[2]),
        *((text, None, None) for text in ("1W3", "1SEND_F3", "1SEND_B3", "0RECV_B3", "1RECV_B3")),
    ],
)
def test_need_and_product_out_of_three_stages(text: str, need: Product | None, product: Product | None) -> None:
    assert need_of(Action.parse(text), 3) == need
    assert product_of(Action.parse(text)) == product


def test_products_read_as_words() -> None:
    golden(str(Product(1, Kind.FORWARD, 3)))
    golden(str(Product(1, Kind.BACKWARD_INPUT, 3)))


@given(ranks=st.integers(1, 5), virtual=st.integers(1, 3), microbatches=st.integers(1, 9))
def test_suppliers_are_the_needs_of_all_actions_at_once(ranks: int, virtual: int, microbatches: int) -> None:
    schedule = build("interleaved", ranks=ranks, microbatches=microbatches, virtual=virtual)
    columns = schedule.columns
    makers = {product_of(columns.action(entry)): entry for entry in range(len(columns))}
    for entry, supplier in enumerate(suppliers(columns, schedule.n_stages).tolist()):
        need = need_of(columns.action(entry), schedule.n_stages)
        assert supplier == (NONE if need is None else makers[need])


def test_the_flow_is_each_rank_s_order_and_every_need() -> None:
    columns = Columns.of(rows("0F0 0B0", "1F0 1B0"))
    graph = flow(columns, suppliers(columns, 2))
    edges = zip(map(columns.action, graph.before), map(columns.action, graph.after), strict=True)
    assert sorted(f"{a}-{b}" for a, b in edges) == ["0F0-0B0", "0F0-1F0", "1B0-0B0", "1F0-1B0"]


def test_of_several_that_make_the_same_the_first_counts() -> None:
    columns = Columns.of(rows("0F0 0F0", "1F0"))
    assert suppliers(columns, 2).tolist() == [NONE, NONE, 0]


def test_what_is_out_of_range_supplies_nothing() -> None:
    columns = Columns.of([[Action(0, Kind.FORWARD, -1), Action(7, Kind.FORWARD, 0)], rows("1F7 0B999999999")[0]])
    assert suppliers(columns, 2).tolist() == [NONE, NEVER, NEVER, NEVER]


def test_numbers_beyond_the_last_still_meet() -> None:
    columns = Columns.of([[Action(0, Kind.FORWARD, 999_999_999)], [Action(1, Kind.FORWARD, 999_999_999)]])
    assert suppliers(columns, 2).tolist() == [NONE, 0]


def test_where_the_orders_contradict_each_rank_says_what_it_waits_for() -> None:
    columns = Columns.of(rows("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0"))
    supplier = suppliers(columns, 2)
    reached = flow(columns, supplier).reach()
    assert [str(columns.action(entry)) for entry in range(8) if reached[entry]] == ["0F0"]
    error = stuck(columns, supplier, 2, reached)
    assert isinstance(error, ScheduleError), "a user's contradictory schedule is a user's error"
    golden(str(error))
    assert [(rank, str(action)) for rank, action, _ in error.waits] == [(0, "0B0"), (1, "1F1")]


def test_what_nobody_makes_holds_up_all_that_is_behind_it() -> None:
    columns = Columns.of(rows("0F0 0B0 0F1", "1B0"))
    assert flow(columns, suppliers(columns, 3)).reach().tolist() == [True, False, False, False]
