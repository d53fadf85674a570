"""The files that timelines go to: pictures and a Chrome trace. All are refused before anything runs, or written."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from typing import NamedTuple, Self

from pipeline.chrome_trace import chrome_trace
from pipeline.trace import Trace
from validation.reports.picture import check_drawable, picture
from validation.worlds.output_file import OutputError, OutputFile


class Paths(NamedTuple):
    """Where an SVG picture, a PNG picture and a Chrome trace go; None is nowhere."""

    svg: str | None = None
    png: str | None = None
    trace: str | None = None


_ENDINGS = Paths(".svg", ".png", ".json")


class Drawings:
    """The files at ``paths``, for timelines of ``actions`` actions in all.

    Raises ``OutputError`` or ``PictureError`` for what cannot be written or drawn.
    """

    def __init__(self, paths: Paths, *, actions: int) -> None:
        for option, path, ending in zip(Paths._fields, paths, _ENDINGS, strict=True):
            if path is not None and not path.lower().endswith(str(ending)):
                raise OutputError(f"--{option} {path}: expected a file that ends in {ending}")
        if paths.svg or paths.png:
            check_drawable(actions)
        with ExitStack() as opened:
            self._files = [opened.enter_context(OutputFile(path)) for path in paths]
            self._opened = opened.pop_all()
        self._paths = paths

    def write(self, timelines: Mapping[str, Trace]) -> None:
        """``timelines``, by name, from the top down: first all are made, and then all are written."""
        svg, png, trace = self._paths
        contents = [
            picture(timelines, file_format="svg") if svg else b"",
            picture(timelines, file_format="png") if png else b"",
            (json.dumps(chrome_trace(timelines)) + "\n").encode() if trace else b"",
        ]
        for file, content in zip(self._files, contents, strict=True):
            file.write(content)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()
