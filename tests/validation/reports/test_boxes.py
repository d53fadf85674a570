"""What is drawn for a span."""

import pytest

from pipeline import Action
from pipeline.costs import trace_of
from pipeline.schedules import build
from pipeline.simulate import simulate
from pipeline.trace import Span
from validation.reports.boxes import COLOURS, HALF, MESSAGE, Box, boxes, letters


def span(name: str, began: float = 2.0, ended: float = 6.0, waited: float = 0.0) -> Span:
    return Span(3, Action.parse(name), began, ended, waited)


def test_every_kind_looks_its_own_way() -> None:
    looks = {kind: [(box.top, box.bottom, box.colour) for box in boxes(span(f"0{kind}0"))] for kind in "FBIW"}
    assert len({str(look) for look in looks.values()}) == 4
    full = {kind: sum(low - high for high, low, colour in look if colour == COLOURS[0]) for kind, look in looks.items()}
    assert full["I"] == pytest.approx(full["W"])
    assert full["B"] == pytest.approx(2 * HALF)
    assert full["F"] == 0 < full["I"] < full["B"] / 2


def test_microbatches_have_colours_that_come_again() -> None:
    colours = [list(boxes(span(f"0B{m}")))[-1].colour for m in range(len(COLOURS) + 1)]
    assert len(set(colours)) == len(COLOURS)
    assert colours[0] == colours[-1]


def test_a_wait_is_left_open_and_nothing_is_drawn_for_no_time() -> None:
    assert {(box.left, box.right) for box in boxes(span("0F0", waited=1.5))} == {(3.5, 6.0)}
    assert list(boxes(span("0F0", waited=4.0))) == []


def test_messages_are_dark_whatever_they_carry() -> None:
    assert list(boxes(span("0SEND_F4"))) == [Box(2, 6, 3 - HALF, 3 + HALF, MESSAGE)]
    assert letters(span("0SEND_F4"), width=0.1) is None


@pytest.mark.parametrize(("width", "text"), [(0.5, "12F34"), (0.8, "12F34"), (1, "F34"), (1.5, "34"), (2.5, None)])
def test_a_name_is_as_long_as_fits(width: float, text: str | None) -> None:
    found = letters(span("12F34"), width=width)
    assert (found and found.text) == text


def test_letters_stand_within_their_box() -> None:
    for row in trace_of(simulate(build("zb-v", ranks=4, virtual=2, microbatches=8))).spans:
        for each in row:
            found = letters(each, width=0.1)
            assert found is not None
            assert each.began < found.x < each.ended
            assert abs(found.y - each.rank) < HALF
