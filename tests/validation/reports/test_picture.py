"""What is on a picture: names that fit, colours that differ, frames, marks and headings."""

from collections import Counter
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from pipeproof.pipeline import Action, Kind, build
from pipeproof.pipeline.costs import trace_of
from pipeproof.pipeline.schedules import FAMILIES, virtuals
from pipeproof.pipeline.timeline import Times, simulate
from pipeproof.reports.canvas import Box, Drawing, Text, text_width
from pipeproof.reports.colours import BLACK, IDLE, MESSAGE, WRONG, colour_of
from pipeproof.reports.panel import Panel, draw_trace
from pipeproof.reports.picture import paint, picture
from tests.pipeline.test_trace import TRACE
from tests.support.golden import golden
from tests.validation.reports.test_colours import contrast
from tests.validation.reports.test_panel import broken

AREA = Box(10, 20, 30, 40, "", says="1B2")


def panel(name: str, *, ranks: int = 4, microbatches: int = 8, times: Times | None = None) -> Panel:
    schedule = build(name, ranks=ranks, microbatches=microbatches, virtual=virtuals(name, looped=2))
    return draw_trace(name, trace_of(simulate(schedule, times or Times())))


def drawn(name: str, **sizes: Any) -> Drawing:
    return picture([panel(name, **sizes)])


def cells(drawing: Drawing) -> dict[str, Box]:
    return {box.says.split(":")[0]: box for box in drawing.boxes if box.says}


def names(drawing: Drawing) -> list[Text]:
    return [text for text in drawing.texts if text.size == 7.5 and text.colour in (BLACK, "#ffffff")]


def words(drawing: Drawing) -> list[str]:
    return [text.text for text in drawing.texts]


SOME = ("1f1b", "interleaved", "zb-h1", "dualpipev")
SIZES = [*((name, 12) for name in FAMILIES), *((name, 40) for name in SOME), ("1f1b", 128)]


@pytest.mark.parametrize(("name", "microbatches"), SIZES)
def test_every_name_lies_in_its_own_cell(name: str, microbatches: int) -> None:
    shown = panel(name, microbatches=microbatches)
    drawing = picture([shown])
    boxes = cells(drawing)
    rows: dict[float, list[Box]] = {}
    for box in boxes.values():
        rows.setdefault(box.top, []).append(box)
    for text in names(drawing):
        top = max(top for top in rows if top < text.middle)
        (box,) = (box for box in rows[top] if box.left <= text.left <= box.left + box.width)
        action = Action.parse(box.says.split(":")[0])
        assert text.text in (str(action), str(action.microbatch))
        assert text_width(text.text, text.size) <= box.width
        assert text.middle + text.size / 2 <= box.top + box.height
    found = [text.text for text in names(drawing)]
    assert len({any(letter in "FBIW" for letter in text) for text in found}) <= 1
    kinds = Counter(cell.action.kind for cell in shown.cells)
    chosen = (some for size in range(len(kinds) + 1) for some in combinations(kinds.values(), size))
    assert len(found) in set(map(sum, chosen))


@pytest.mark.parametrize("name", FAMILIES)
def test_small_pictures_name_every_cell(name: str) -> None:
    drawing = drawn(name)
    assert sorted(text.text for text in names(drawing)) == sorted(cells(drawing))


def test_where_no_name_fits_microbatches_are_dark() -> None:
    drawing = drawn("1f1b", ranks=32, microbatches=128)
    assert names(drawing) == []
    golden("\n".join(words(drawing)), lines="darkest")
    boxes = cells(drawing)
    assert boxes["7F32"].fill == boxes["8F48"].fill == colour_of(Kind.FORWARD, stressed=True)
    assert boxes["7F33"].fill == colour_of(Kind.FORWARD)
    assert not [text for text in words(drawn("1f1b")) if "darkest" in text]


def test_colours_stand_for_kinds_and_places() -> None:
    actions = {Action.parse(name): box.fill for name, box in cells(drawn("zb-v", microbatches=20)).items()}
    looks = {(fill, kind, stage >= 4) for (stage, kind, _), fill in actions.items()}
    assert len(looks) == len({*actions.values()}) == 6


def test_halves_of_a_backward_wear_bars() -> None:
    (_, upper), (_, lower) = (
        list(paint(kind, "#808080", AREA)) for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )
    assert upper.top == AREA.top
    assert lower.top + lower.height == AREA.top + AREA.height
    assert upper.height == lower.height < AREA.height / 4
    assert contrast(upper.fill, "#808080") > 2
    assert [len(list(paint(kind, "#808080", AREA))) for kind in (Kind.FORWARD, Kind.BACKWARD)] == [1, 1]


def test_what_runs_as_one_has_one_frame() -> None:
    shown = panel("dualpipev")
    drawing = picture([shown])
    boxes = cells(drawing)
    frames = [box for box in drawing.boxes if box.edge == BLACK][1:]  # the first is the legend's
    assert len(frames) == len(shown.pairs)
    for frame, (one, other) in zip(frames, shown.pairs, strict=True):
        left, right = boxes[str(one.action)], boxes[str(other.action)]
        assert frame.left == left.left
        assert left.left + left.width == pytest.approx(right.left)
        assert frame.left + frame.width == pytest.approx(right.left + right.width)
    assert "run as one" in words(drawing)
    assert "run as one" not in words(drawn("zb-v"))


def test_what_breaks_a_law_is_drawn_red() -> None:
    drawing = picture([broken()])
    boxes = [box for box in drawing.boxes if box.says]
    red = {box.says.split(":")[0] for box in boxes if box.fill == WRONG}
    assert red == {"1F1", "1B0", "1F0"}
    assert all(contrast(box.fill, "#ffffff") < 2 for box in boxes if box.fill != WRONG)
    assert "breaks a law" in words(drawing)
    golden(" ".join(words(drawing)))
    assert "idle" not in words(drawing)
    assert {text.text for text in drawing.texts if text.colour == "#555555"} > {"0", "1", "2", "3", "4"}
    assert "0.5" not in words(drawing)
    (text,) = (text for text in drawing.texts if text.text == "rank 1")
    assert (text.colour, text.bold) == (WRONG, True)


def test_panels_share_one_axis_and_keep_their_order() -> None:
    with pytest.raises(AssertionError, match="share a unit"):
        picture([draw_trace("measured", TRACE), panel("1f1b")])
    short, long = panel("1f1b", microbatches=4), panel("gpipe", microbatches=12)
    drawing = picture([short, long])
    found = words(drawing)
    ticks = [text.text for text in drawing.texts if text.text.isdigit() and text.colour == "#555555"]
    assert ticks == [*ticks[: len(ticks) // 2]] * 2
    assert max(map(int, ticks)) > short.end
    assert found.index(short.title) < found.index(long.title)
    idle = [box for box in drawing.boxes if box.fill == IDLE and box.width > 100]
    assert idle[0].width / idle[-1].width == pytest.approx(short.end / long.end)
    golden(drawing.says)


def test_measured_time_and_messages_are_drawn() -> None:
    drawing = picture([draw_trace("measured", TRACE.from_zero())])
    assert {"time in milliseconds", "messages", "4000"} <= set(words(drawing))
    assert cells(drawing)["0SEND_F0"].fill == MESSAGE
    assert sorted(text.text for text in names(drawing)) == ["0F0", "1F0"]


def test_a_very_short_cell_is_still_there() -> None:
    trace = trace_of(simulate(build("1f1b", ranks=4, microbatches=8)))
    *rows, (*spans, last) = trace.spans
    shorter = (*rows, (*spans, last._replace(began=last.ended - 0.02)))
    boxes = cells(picture([draw_trace("1f1b", replace(trace, spans=shorter))]))
    assert 0 < boxes["3B7"].width < 1
    assert boxes["3B7"].width < boxes["3B6"].width / 50


def test_what_takes_no_time_leaves_an_empty_picture() -> None:
    drawing = drawn("1f1b", times=Times(0, 0, 0))
    assert cells(drawing) == {}
    assert {"0", "rank 3"} <= set(words(drawing))


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (4, 8), (64, 64), (400, 2)])
def test_a_picture_has_a_size_for_screens(ranks: int, microbatches: int) -> None:
    drawing = picture([panel("gpipe", ranks=ranks, microbatches=microbatches)] * 2)
    assert 8 <= drawing.width / 72 <= 24
    assert drawing.height / 72 <= 125
