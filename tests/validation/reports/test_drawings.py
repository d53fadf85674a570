"""Pictures and traces as files: all or none, and what is refused."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipeproof.pipeline import build
from pipeproof.reports.canvas import PictureError
from pipeproof.reports.drawings import ENDINGS, MOST, check_drawings, draw_panels, draw_timelines
from pipeproof.worlds.output_file import OutputError, OutputFile
from tests.pipeline.test_trace import TRACE
from tests.validation.reports.test_panel import broken


@pytest.fixture
def files(tmp_path: Path) -> Iterator[dict[str, OutputFile]]:
    paths = zip(ENDINGS, (".svg", ".PNG", ".json"), strict=True)
    with ExitStack() as opened:
        yield {name: opened.enter_context(OutputFile(str(tmp_path / f"x{ending}"))) for name, ending in paths}


def there(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


@pytest.mark.long
def test_every_file_is_written(files: dict[str, OutputFile], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_timelines(files, {"measured": TRACE.from_zero()})
    assert there(tmp_path) == ["x.PNG", "x.json", "x.svg"]
    assert (tmp_path / "x.PNG").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "x.svg").read_text().startswith("<svg")
    assert json.loads((tmp_path / "x.json").read_text())["traceEvents"]


def test_what_has_no_times_is_no_trace(files: dict[str, OutputFile], tmp_path: Path) -> None:
    draw_panels({**files, "png": OutputFile(None)}, [broken()])
    assert there(tmp_path) == ["x.svg"]
    assert "breaks 2 laws" in (tmp_path / "x.svg").read_text()


def test_only_a_png_needs_a_plotting_library(
    files: dict[str, OutputFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_drawings({"svg": "x.svg", "trace": "x.json"}, actions=4)
    draw_timelines({**files, "png": OutputFile(None)}, {"measured": TRACE.from_zero()})
    assert there(tmp_path) == ["x.json", "x.svg"]
    with pytest.raises(PictureError, match=r"needs matplotlib, .* pip install 'pipeproof\[plot\]'"):
        check_drawings({"png": "x.png"}, actions=4)
    check_drawings({"trace": "x.json"}, actions=10**9)


@pytest.mark.long
def test_two_large_schedules_can_be_drawn() -> None:
    assert 2 * len(build("zb-v", ranks=32, microbatches=128).columns) <= MOST


@pytest.mark.parametrize(
    ("wanted", "actions", "words"),
    [
        ({"svg": "x.png"}, 1, "--svg x.png: expected a file that ends in .svg"),
        ({"png": "x"}, 1, "--png x: expected a file that ends in .png"),
        ({"trace": "x.perfetto"}, 1, "--trace x.perfetto: expected a file that ends in .json"),
        ({"svg": "x.svg"}, MOST + 1, f"a picture of {MOST + 1} actions: expected at most {MOST}"),
    ],
)
def test_what_cannot_be_drawn_is_refused(wanted: dict[str, str | None], actions: int, words: str) -> None:
    with pytest.raises((OutputError, PictureError), match=words):
        check_drawings(wanted, actions=actions)


def test_a_picture_that_fails_leaves_no_file(
    files: dict[str, OutputFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bytes:
        raise RuntimeError

    monkeypatch.setattr("pipeproof.reports.drawings.png", fail)
    with pytest.raises(RuntimeError):
        draw_timelines(files, {"measured": TRACE})
    assert there(tmp_path) == []
