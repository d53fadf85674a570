"""Timelines as files: pictures, and a Chrome trace. Bad paths are refused before anything runs or is written."""

import json
from collections.abc import Mapping, Sequence

from pipeproof.pipeline.chrome_trace import chrome_trace
from pipeproof.pipeline.trace import Trace
from pipeproof.reports.canvas import PictureError, check_drawable, png, svg
from pipeproof.reports.panel import Panel, draw_trace
from pipeproof.reports.picture import picture
from pipeproof.worlds.output_file import OutputError, OutputFile

MOST = 50_000  # actions: two of 32 ranks, 128 microbatches and split backwards; more have no pixels
ENDINGS = {"svg": ".svg", "png": ".png", "trace": ".json"}


def check_drawings(paths: Mapping[str, str | None], *, actions: int) -> None:
    """Raise ``OutputError`` or ``PictureError`` if one of ``paths`` cannot hold timelines of so many actions in all."""
    for option, ending in ENDINGS.items():
        path = paths.get(option)
        if path not in (None, "-") and not str(path).lower().endswith(ending):
            raise OutputError(f"--{option} {path}: expected a file that ends in {ending}")
    if paths.get("png"):
        check_drawable()
    if (paths.get("svg") or paths.get("png")) and actions > MOST:
        raise PictureError(f"a picture of {actions} actions: expected at most {MOST}; --trace FILE takes any number")


def draw_timelines(files: Mapping[str, OutputFile], timelines: Mapping[str, Trace], *, unit: str = "") -> None:
    """Write ``timelines``, by name, from the top down.

    ``unit``: the unit of their times, if neither seconds nor a stage's times.
    """
    panels = [draw_trace(name, timeline, unit=unit) for name, timeline in timelines.items()]
    draw_panels(files, panels, chrome_trace(timelines) if files["trace"].wanted else None)


def draw_panels(files: Mapping[str, OutputFile], panels: Sequence[Panel], trace: object = None) -> None:
    """Write ``panels`` as pictures, first render all, then write all; without times, no ``trace``."""
    writers = {name: writer for name, writer in (("svg", svg), ("png", png)) if files[name].wanted}
    drawing = picture(panels) if writers else None
    contents = {name: writer(drawing) for name, writer in writers.items() if drawing}
    if trace is not None:
        contents["trace"] = f"{json.dumps(trace)}\n".encode()
    for name, content in contents.items():
        files[name].write(content)
