"""Pictures as files: what must be in them, and what is refused."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from pipeproof.pipeline import Action
from pipeproof.pipeline.costs import trace_of
from pipeproof.pipeline.schedules import build
from pipeproof.pipeline.simulate import simulate
from pipeproof.pipeline.trace import Span, Trace
from pipeproof.reports.picture import (
    COLOURS,
    HALF,
    MESSAGE,
    MOST,
    Box,
    Drawings,
    Layout,
    Paths,
    PictureError,
    boxes,
    check_drawable,
    letters,
    picture,
)
from pipeproof.worlds.output_file import OutputError
from tests.pipeline.test_trace import TRACE

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


def paths(folder: Path) -> Paths:
    return Paths(*(str(folder / f"x{ending}") for ending in (".svg", ".PNG", ".json")))


def test_every_file_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with Drawings(paths(tmp_path), actions=4) as files:
        files.write({"measured": TRACE})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.PNG", "x.json", "x.svg"]
    assert (tmp_path / "x.PNG").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "x.json").read_text())["traceEvents"]


def test_a_chrome_trace_needs_no_plotting_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with Drawings(Paths(trace=str(tmp_path / "x.json")), actions=10**9) as files:
        files.write({"measured": TRACE})
    assert (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (Paths(svg="x.png"), "--svg x.png: expected a file that ends in .svg"),
        (Paths(png="x"), "--png x: expected a file that ends in .png"),
        (Paths(trace="x.perfetto"), "--trace x.perfetto: expected a file that ends in .json"),
    ],
)
def test_an_ending_that_says_something_else_is_refused(wanted: Paths, words: str) -> None:
    with pytest.raises(OutputError, match=words):
        Drawings(wanted, actions=1)


def test_without_the_library_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(PictureError, match="extra 'plot'"):
        Drawings(paths(tmp_path), actions=4)
    assert list(tmp_path.iterdir()) == []


def test_one_bad_path_leaves_none_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeproof.reports.picture.check_drawable", lambda actions: None)
    bad = paths(tmp_path)._replace(trace=str(tmp_path / "no" / "x.json"))
    with pytest.raises(OutputError, match=r"cannot write .*no/x\.json"):
        Drawings(bad, actions=4)
    assert list(tmp_path.iterdir()) == []


def test_a_picture_that_cannot_be_made_leaves_none_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> bytes:
        raise RuntimeError

    monkeypatch.setattr("pipeproof.reports.picture.check_drawable", lambda actions: None)
    monkeypatch.setattr("pipeproof.reports.picture.picture", fail)
    with pytest.raises(RuntimeError), Drawings(paths(tmp_path), actions=4) as files:
        files.write({"measured": TRACE})
    assert list(tmp_path.iterdir()) == []
