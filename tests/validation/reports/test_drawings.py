"""The files of a timeline: all of them, or a refusal and none."""

import json
from pathlib import Path

import pytest

from tests.pipeline.test_trace import TRACE
from validation.reports import drawings, picture
from validation.reports.drawings import Drawings, Paths
from validation.reports.picture import PictureError
from validation.worlds.output_file import OutputError


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
    monkeypatch.setattr(drawings, "check_drawable", lambda actions: None)
    bad = paths(tmp_path)._replace(trace=str(tmp_path / "no" / "x.json"))
    with pytest.raises(OutputError, match=r"cannot write .*no/x\.json"):
        Drawings(bad, actions=4)
    assert list(tmp_path.iterdir()) == []


def test_a_picture_that_cannot_be_made_leaves_none_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> bytes:
        raise RuntimeError

    monkeypatch.setattr(drawings, "check_drawable", lambda actions: None)
    monkeypatch.setattr(drawings, "picture", fail)
    with pytest.raises(RuntimeError), Drawings(paths(tmp_path), actions=4) as files:
        files.write({"measured": TRACE})
    assert list(tmp_path.iterdir()) == []
    assert picture.picture is not fail
