"""What needs what, and the walk that respects it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.action import Action, Kind
from pipeline.dataflow import Product, Stuck, need_of, product_of, walk
from pipeline.schedule import ScheduleError
from pipeline.schedules import build


def rows(*texts: str) -> list[list[Action]]:
    return [[Action.parse(cell) for cell in text.split()] for text in texts]


@pytest.mark.parametrize(
    ("text", "need"),
    [
        ("0F3", None),
        ("1F3", Product(0, Kind.FORWARD, 3)),
        ("2F3", Product(1, Kind.FORWARD, 3)),
        ("0B3", Product(1, Kind.BACKWARD_INPUT, 3)),
        ("1I3", Product(2, Kind.BACKWARD_INPUT, 3)),
        ("2B3", None),
        ("2I3", None),
        ("1W3", None),
        ("1SEND_F3", None),
        ("1RECV_B3", None),
    ],
)
def test_need_of_an_action_out_of_three_stages(text: str, need: Product | None) -> None:
    assert need_of(Action.parse(text), 3) == need


@pytest.mark.parametrize(
    ("text", "product"),
    [
        ("0F3", Product(0, Kind.FORWARD, 3)),
        ("1B3", Product(1, Kind.BACKWARD_INPUT, 3)),
        ("1I3", Product(1, Kind.BACKWARD_INPUT, 3)),
        ("1W3", None),
        ("1SEND_B3", None),
        ("0RECV_B3", None),
    ],
)
def test_product_of_an_action(text: str, product: Product | None) -> None:
    assert product_of(Action.parse(text)) == product


def test_products_read_as_words() -> None:
    assert str(Product(1, Kind.FORWARD, 3)) == "stage 1's output of microbatch 3"
    assert str(Product(1, Kind.BACKWARD_INPUT, 3)) == "stage 1's input gradient of microbatch 3"


@given(ranks=st.integers(1, 5), virtual=st.integers(1, 3), microbatches=st.integers(1, 9))
@settings(deadline=None)
def test_walk_visits_everything_once_and_in_order(ranks: int, virtual: int, microbatches: int) -> None:
    schedule = build("interleaved", ranks=ranks, microbatches=microbatches, virtual=virtual)
    made: set[Product] = set()
    next_slot = [0] * ranks
    for rank, slot in walk(schedule.ranks, schedule.n_stages):
        assert slot == next_slot[rank], "a rank's actions come in its own order"
        next_slot[rank] += 1
        action = schedule.ranks[rank][slot]
        need, product = need_of(action, schedule.n_stages), product_of(action)
        assert need is None or need in made
        if product is not None:
            made.add(product)
    assert next_slot == [len(actions) for actions in schedule.ranks]


def test_walk_stops_where_the_orders_contradict() -> None:
    contradictory = rows("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")
    seen: list[tuple[int, int]] = []
    with pytest.raises(Stuck) as caught:
        seen.extend(walk(contradictory, 2))
    assert seen == [(0, 0)]
    assert isinstance(caught.value, ScheduleError), "a user's contradictory schedule is a user's error"
    assert str(caught.value) == (
        "no rank can go on: rank 0 waits at 0B0 for stage 1's input gradient of microbatch 0; "
        "rank 1 waits at 1F1 for stage 0's output of microbatch 1"
    )
    assert [(rank, str(action)) for rank, action, _ in caught.value.waits] == [(0, "0B0"), (1, "1F1")]


def test_walk_wakes_every_rank_that_waits_for_one_product() -> None:
    """Malformed (stage 1 on two ranks), but a walk must not lose a sleeper: laws are checked over all of it."""
    assert sorted(walk(rows("1F0", "1F0", "0F0"), 2)) == [(0, 0), (1, 0), (2, 0)]
