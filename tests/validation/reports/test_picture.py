"""Pictures as files: what must be in them, and what is refused."""

import importlib.util
import re
from pathlib import Path

import pytest

from pipeline.costs import trace_of
from pipeline.schedules import build
from pipeline.simulate import simulate
from pipeline.trace import Trace
from tests.pipeline.test_trace import TRACE
from validation.reports.picture import MOST, Layout, PictureError, check_drawable, picture

needs_matplotlib = pytest.mark.skipif(not importlib.util.find_spec("matplotlib"), reason="needs the extra 'plot'")


def simulated(name: str, **shape: int) -> Trace:
    return trace_of(simulate(build(name, **({"ranks": 4, "microbatches": 8} | shape))))


def texts(svg: bytes) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.decode())


@needs_matplotlib
def test_an_svg_names_ranks_actions_kinds_and_both_panels() -> None:
    found = texts(picture({"upper": simulated("zb-v", virtual=2), "lower": simulated("1f1b")}, file_format="svg"))
    assert found.count("rank 3") == 2
    assert {"upper", "lower", "7I4", "0W7", "3B7", "F  forward", "W  weight gradients", "idle"} <= set(found)
    assert found.index("upper") < found.index("lower")
    assert "messages" not in found


@needs_matplotlib
def test_both_panels_have_the_same_axis() -> None:
    short, long = simulated("1f1b", microbatches=4), simulated("1f1b", microbatches=12)
    found = texts(picture({"short": short, "long": long}, file_format="svg"))
    ticks = [text for text in found if text.isdigit()]
    assert ticks == [*ticks[: len(ticks) // 2]] * 2
    assert max(map(int, ticks)) > short.makespan


@needs_matplotlib
def test_measured_time_is_in_milliseconds_and_messages_are_explained() -> None:
    found = texts(picture({"measured": TRACE}, file_format="svg"))
    assert {"time in milliseconds", "messages", "4000"} <= set(found)


@needs_matplotlib
@pytest.mark.parametrize("file_format", ["svg", "png"])
def test_equal_panels_give_equal_files(file_format: str) -> None:
    one, two = (picture({"1f1b": simulated("1f1b")}, file_format=file_format) for _ in range(2))
    assert one == two
    assert one.startswith(b"\x89PNG" if file_format == "png" else b"<?xml")
    assert picture({"1f1b": simulated("gpipe")}, file_format=file_format) != one


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (4, 8), (64, 64), (1024, 8)])
def test_a_picture_has_a_size_that_can_be_shown(ranks: int, microbatches: int) -> None:
    layout = Layout.of([simulated("gpipe", ranks=ranks, microbatches=microbatches)] * 2)
    assert 8 <= layout.width <= 24
    assert layout.height <= 125


def test_panels_in_different_units_are_no_picture() -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(AssertionError, match="share a unit"):
        picture({"measured": TRACE, "on paper": simulated("1f1b")}, file_format="svg")


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PictureError, match=r"the extra 'plot' brings: pip install 'pipeproof\[plot\]'"):
        check_drawable(1)


def test_more_actions_than_pixels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: Path(name))
    check_drawable(MOST)
    with pytest.raises(PictureError, match=f"a picture of {MOST + 1} actions: expected at most {MOST}"):
        check_drawable(MOST + 1)
