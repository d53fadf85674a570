"""Drawings as files: SVG whose text is text, PNG, and letters that are as wide as is thought."""

import importlib.util
from xml.etree import ElementTree

import pytest

from pipeproof.reports.canvas import (
    Box,
    Drawing,
    Text,
    figure,
    png,
    svg,
    text_width,
    wrap_text,
)
from tests.support.golden import golden
from tests.validation.reports.test_picture import SOME, drawn

needs_matplotlib = pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="needs the extra 'plot'")
SVG = "{http://www.w3.org/2000/svg}"
BOX = Box(1, 2, 30, 40, "#ff0000", says="2F0: <all> & more")
DRAWING = Drawing(
    100, 50, (BOX, Box(0, 0, 9, 9, "", "#000000", 1.5)), (Text("a < b", 5, 6, 8, "middle"),), "what & why"
)


def test_an_svg_is_text_boxes_and_tooltips() -> None:
    root = ElementTree.fromstring(svg(DRAWING))
    golden(root.attrib["viewBox"])
    assert [child.text for child in root.findall(f"{SVG}title")] == ["what & why"]
    ground, red, frame = root.findall(f"{SVG}rect")
    assert ground.attrib["width"] == "100"
    golden("\n".join(str(title.text) for title in red))
    assert (frame.attrib["fill"], frame.attrib["pointer-events"], len(frame)) == ("none", "none", 0)
    (text,) = root.findall(f"{SVG}text")
    assert text.text == "a < b"
    assert text.attrib["text-anchor"] == "middle"
    assert wrap_text("one two three", width=text_width("0000000", 8) + 0.1, size=8) == ["one two", "three"]


@pytest.mark.long
@needs_matplotlib
def test_equal_drawings_give_equal_files() -> None:
    assert svg(DRAWING) == svg(DRAWING)
    assert png(DRAWING) == png(DRAWING)
    assert png(DRAWING).startswith(b"\x89PNG")


@pytest.mark.long
@needs_matplotlib
@pytest.mark.parametrize("name", SOME)
def test_no_text_leaves_the_picture(name: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    drawing = drawn(name, ranks=4, microbatches=12)
    made = figure(drawing)
    renderer = FigureCanvasAgg(made).get_renderer()
    (axes,) = made.axes
    points = 72 / made.dpi
    for text, shown in zip(drawing.texts, axes.texts, strict=True):
        extent = shown.get_window_extent(renderer)
        assert extent.width * points <= text_width(text.text, text.size) * (1.12 if text.bold else 1.0) + 1
        assert extent.x0 >= 0
        assert extent.x1 * points <= drawing.width
        assert 0 <= extent.y0
        assert extent.y1 * points <= drawing.height
