"""Timelines as files: pictures, and a Chrome trace. Bad paths are refused before anything runs or is written."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple, Self

from pipeproof.pipeline.chrome_trace import chrome_trace
from pipeproof.pipeline.trace import Trace
from pipeproof.reports.canvas import PictureError, check_drawable, png, svg
from pipeproof.reports.panel import Panel, draw_trace
from pipeproof.reports.picture import picture
from pipeproof.worlds.output_file import OutputError, OutputFile

MOST = 50_000  # actions: two of 32 ranks, 128 microbatches and split backwards; more have no pixels


class Paths(NamedTuple):
    """Paths for an SVG picture, a PNG picture and a Chrome trace; None for no file."""

    svg: str | None = None
    png: str | None = None
    trace: str | None = None


_ENDINGS = Paths(".svg", ".png", ".json")


class Drawings:
    """The files at ``paths``, for timelines of ``actions`` actions in all.

    Raises ``OutputError`` or ``PictureError`` if one cannot be written or drawn.
    """

    def __init__(self, paths: Paths, *, actions: int) -> None:
        for option, path, ending in zip(Paths._fields, paths, _ENDINGS, strict=True):
            if path not in (None, "-") and not str(path).lower().endswith(str(ending)):
                raise OutputError(f"--{option} {path}: expected a file that ends in {ending}")
        if paths.png:
            check_drawable()
        if (paths.svg or paths.png) and actions > MOST:
            raise PictureError(
                f"a picture of {actions} actions: expected at most {MOST}; --trace FILE takes any number"
            )
        with ExitStack() as opened:
            self._files = [opened.enter_context(OutputFile(path)) for path in paths]
            self._opened = opened.pop_all()
        self._paths = paths

    def write(self, timelines: Mapping[str, Trace], *, unit: str = "") -> None:
        """Write ``timelines``, by name, from the top down: first render all, then write all.

        ``unit``: the unit of their times, if neither seconds nor a stage's times.
        """
        panels = [draw_trace(name, timeline, unit=unit) for name, timeline in timelines.items()]
        self.write_panels(panels, chrome_trace(timelines) if self._paths.trace else None)

    def write_panels(self, panels: Sequence[Panel], trace: object = None) -> None:
        """Write ``panels`` as pictures; without times, no ``trace``."""
        drawing = picture(panels) if self._paths.svg or self._paths.png else None
        writers = (self._paths.svg and svg, self._paths.png and png)
        contents = [writer(drawing) if writer and drawing else b"" for writer in writers]
        contents.append(b"" if trace is None else f"{json.dumps(trace)}\n".encode())
        for file, content in zip(self._files, contents, strict=True):
            if content:
                file.write(content)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()
