"""Pictures and traces as files: all or none, and what is refused."""

import json
from pathlib import Path

import pytest

from pipeproof.pipeline import build
from pipeproof.reports.canvas import PictureError
from pipeproof.reports.drawings import MOST, Drawings, Paths
from pipeproof.worlds.output_file import OutputError
from tests.pipeline.test_trace import TRACE
from tests.validation.reports.test_panel import broken


def paths(folder: Path) -> Paths:
    return Paths(*(str(folder / f"x{ending}") for ending in (".svg", ".PNG", ".json")))


@pytest.mark.long
def test_every_file_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with Drawings(paths(tmp_path), actions=4) as files:
        files.write({"measured": TRACE.from_zero()})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.PNG", "x.json", "x.svg"]
    assert (tmp_path / "x.PNG").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "x.svg").read_text().startswith("<svg")
    assert json.loads((tmp_path / "x.json").read_text())["traceEvents"]


def test_what_has_no_times_is_no_trace(tmp_path: Path) -> None:
    with Drawings(paths(tmp_path)._replace(png=None), actions=9) as files:
        files.write_panels([broken()])
    assert [path.name for path in tmp_path.iterdir()] == ["x.svg"]
    assert "breaks 2 laws" in (tmp_path / "x.svg").read_text()


def test_svg_and_trace_need_no_plotting_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with Drawings(paths(tmp_path)._replace(png=None), actions=4) as files:
        files.write({"measured": TRACE.from_zero()})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.json", "x.svg"]


def test_more_actions_than_pixels_are_no_picture(tmp_path: Path) -> None:
    with pytest.raises(PictureError, match=f"a picture of {MOST + 1} actions: expected at most {MOST}"):
        Drawings(Paths(svg=str(tmp_path / "x.svg")), actions=MOST + 1)
    Drawings(Paths(trace=str(tmp_path / "x.json")), actions=10**9).__exit__()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_two_large_schedules_can_be_drawn() -> None:
    assert 2 * len(build("zb-v", ranks=32, microbatches=128).columns) <= MOST


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


@pytest.mark.parametrize("fault", ["library", "path", "picture"])
def test_what_fails_leaves_no_file(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bytes:
        raise RuntimeError

    wanted, errors = paths(tmp_path), {"library": PictureError, "path": OutputError, "picture": RuntimeError}
    if fault == "library":
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    else:
        monkeypatch.setattr("pipeproof.reports.drawings.check_drawable", lambda: None)
        monkeypatch.setattr("pipeproof.reports.drawings.png", fail)
    if fault == "path":
        wanted = wanted._replace(trace=str(tmp_path / "no" / "x.json"))
    with pytest.raises(errors[fault]), Drawings(wanted, actions=4) as files:
        files.write({"measured": TRACE})
    assert list(tmp_path.iterdir()) == []
