"""Timelines as pictures: ranks from top to bottom, time from left to right, one panel above the other.

A microbatch has a colour, and a kind of action its way of wearing it: a forward is pale, a backward full, and of its
two halves the input's fills the upper edge and the weights' the lower one. Everything is drawn by matplotlib, which is
the extra ``plot``: it is imported here and nowhere else, when something is drawn.
"""

import importlib.util
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from pipeline.action import COMPUTE, Action, Kind
from pipeline.trace import Span, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 20_000  # actions; a picture of more has no pixels for each of them

_COLOURS = ("#2f6fbf", "#dd7a1a", "#2c9a4b", "#c23b3b", "#7d55b5", "#8f5d33", "#d052a2", "#5d6a78", "#92921a", "#159cae")
_MESSAGE, _IDLE, _SAMPLE = "#23282e", "#ececec", "#6b6b6b"
_PALE = 0.62  # how much white is in a pale colour
_HALF = 0.42  # half of a box's height, where the distance of two ranks is 1
_EDGE = 0.36  # the part of a box's height that a half backward fills
_LETTER_PT, _LETTER_WIDTH = 7.5, 0.64  # a letter's height, and its width as a part of that
_ROW_IN, _CELL_IN, _WIDTHS_IN = 0.36, 0.33, (8.0, 36.0)
_LEFT_IN, _RIGHT_IN, _TOP_IN, _BETWEEN_IN, _BOTTOM_IN = 0.7, 0.25, 0.75, 0.5, 0.5


class PictureError(ValueError):
    """A picture that cannot be drawn."""


class Style(NamedTuple):
    """How a kind is drawn: its name, the part of its height in full colour (0 is the upper edge), and its letters."""

    name: str
    full: tuple[float, float]
    letters: str

    @property
    def middle(self) -> float:
        """Where the letters stand: in the middle of what is pale, or of all."""
        start, end = self.full
        return start / 2 if end == 1 and start > 0 else (1 + end) / 2 if start == 0 and end < 1 else 0.5


STYLES: Mapping[Kind, Style] = {
    Kind.FORWARD: Style("F  forward", (0, 0), "#1b1b1b"),
    Kind.BACKWARD: Style("B  backward", (0, 1), "white"),
    Kind.BACKWARD_INPUT: Style("I  input gradient", (0, _EDGE), "#1b1b1b"),
    Kind.BACKWARD_WEIGHT: Style("W  weight gradients", (1 - _EDGE, 1), "#1b1b1b"),
}


def check_drawable(actions: int) -> None:
    """Raise ``PictureError`` unless so many actions can be drawn, and there is something to draw them with."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PictureError("a picture needs matplotlib, which the extra 'plot' brings: pip install 'pipeproof[plot]'")
    if actions > MOST:
        raise PictureError(f"a picture of {actions} actions: expected at most {MOST}; --trace FILE takes any number")


def picture(panels: Mapping[str, Trace], *, file_format: str) -> bytes:
    """``panels``, by their titles and all in one unit of time, as a file: "svg" or "png". Equal panels, equal bytes."""
    from matplotlib import rc_context

    file = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "pipeproof", "font.family": "sans-serif"}):
        metadata = {"Date": None} if file_format == "svg" else None
        _figure(panels).savefig(file, format=file_format, dpi=160, metadata=metadata)
    return file.getvalue()


def _figure(panels: Mapping[str, Trace]) -> "Figure":
    from matplotlib.figure import Figure

    traces = list(panels.values())
    scale, unit = _unit(traces)
    end = max(trace.makespan for trace in traces) * scale
    rows = [len(trace.spans) for trace in traces]
    width = _width(traces)
    height = _TOP_IN + sum(rows) * _ROW_IN + _BETWEEN_IN * (len(rows) - 1) + _BOTTOM_IN
    room = width - _LEFT_IN - _RIGHT_IN
    letter = _LETTER_PT / 72 * _LETTER_WIDTH * end / room  # in time
    figure = Figure(figsize=(width, height), facecolor="white")
    top = height - _TOP_IN
    for (title, trace), count in zip(panels.items(), rows, strict=True):
        bottom = top - count * _ROW_IN
        axes = figure.add_axes((_LEFT_IN / width, bottom / height, room / width, (top - bottom) / height))
        axes.set_xlim(0, end)
        _panel(axes, title, trace, scale)
        _letter(axes, trace, scale, letter)
        top = bottom - _BETWEEN_IN
    axes.set_xlabel(f"time in {unit}", fontsize=8)
    strip = figure.add_axes((_LEFT_IN / width, 1 - 0.38 / height, room / width, 0.24 / height))
    _legend(strip, _kinds(traces), room)
    return figure


def _unit(traces: Sequence[Trace]) -> tuple[float, str]:
    """What times are multiplied by, and the unit that they are in then."""
    kinds = {trace.in_seconds for trace in traces}
    assert len(kinds) == 1, "panels that share an axis share a unit of time"
    if not kinds.pop():
        return 1.0, "units of T_F, T_I and T_W"
    return (1.0, "seconds") if max(trace.makespan for trace in traces) >= 10 else (1e3, "milliseconds")


def _width(traces: Iterable[Trace]) -> float:
    """Inches in which a middling action has room for its name, within reason."""
    cells = 0.0
    for trace in traces:
        worked = [span.worked for row in trace.spans for span in row if span.action.kind in COMPUTE]
        middle = median(worked) if worked else 0.0
        cells = max(cells, trace.makespan / middle if middle else 0.0)
    least, most = _WIDTHS_IN
    return min(max(cells * _CELL_IN, least), most)


def _kinds(traces: Iterable[Trace]) -> set[Kind]:
    return {span.action.kind for trace in traces for row in trace.spans for span in row}


def _panel(axes: "Axes", title: str, trace: Trace, scale: float) -> None:
    from matplotlib.collections import PolyCollection

    count = len(trace.spans)
    end = trace.makespan * scale
    axes.set_ylim(count - 0.5, -0.5)
    axes.set_yticks(range(count), [f"rank {rank}" for rank in range(count)], fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", length=2, labelsize=7.5)
    axes.set_title(title, loc="left", fontsize=9.5, pad=5)
    axes.spines[:].set_visible(False)
    axes.barh(range(count), end, height=2 * _HALF, color=_IDLE, linewidth=0)
    axes.axvline(end, color="#555555", linewidth=0.8, linestyle="dashed")
    boxes = [box for row in trace.spans for span in row for box in _boxes(span, scale)]
    if boxes:
        corners, fills = zip(*boxes, strict=True)
        edges = ["none" if fill == _MESSAGE else "white" for fill in fills]
        axes.add_collection(PolyCollection(corners, facecolors=fills, edgecolors=edges, linewidths=0.5))


Box = tuple[list[tuple[float, float]], str]  # four corners (x, y), and the colour inside


def _boxes(span: Span, scale: float) -> Iterator[Box]:
    """What is drawn for ``span``: nothing for its wait, so that the idle ground shows."""
    if span.worked > 0:
        yield from _boxes_at(span.action, (span.worked_from * scale, span.ended * scale), span.rank - _HALF, 2 * _HALF)


def _boxes_at(action: Action, times: tuple[float, float], top: float, height: float) -> Iterator[Box]:
    style = STYLES.get(action.kind)
    if style is None:
        yield _box(times, top, top + height), _MESSAGE
        return
    colour = _COLOURS[action.microbatch % len(_COLOURS)] if action.microbatch >= 0 else _SAMPLE
    yield _box(times, top, top + height), _pale(colour)
    start, end = style.full
    if end > start:
        yield _box(times, top + start * height, top + end * height), colour


def _box(times: tuple[float, float], top: float, bottom: float) -> list[tuple[float, float]]:
    left, right = times
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _pale(colour: str) -> str:
    parts = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * _PALE):02x}" for part in parts)


def _letter(axes: "Axes", trace: Trace, scale: float, width: float) -> None:
    """Write the most of every action's name that fits into its box: ``2F0``, ``F0``, ``0`` or nothing."""
    for row in trace.spans:
        for span in row:
            style = STYLES.get(span.action.kind)
            if style is None:
                continue
            stage, kind, microbatch = span.action
            fitting = int(span.worked * scale / width)
            text = next((t for t in (f"{stage}{kind}{microbatch}", f"{kind}{microbatch}", f"{microbatch}")
                         if len(t) <= fitting), "")  # fmt: skip
            if text:
                middle = (span.worked_from + span.ended) / 2 * scale
                height = span.rank + (2 * style.middle - 1) * _HALF
                axes.text(middle, height, text, color=style.letters, fontsize=_LETTER_PT, ha="center",
                          va="center_baseline")  # fmt: skip


def _legend(axes: "Axes", kinds: set[Kind], width: float) -> None:
    """One line in which every kind is shown without a microbatch's colour; ``width`` in inches."""
    from matplotlib.collections import PolyCollection

    axes.set_axis_off()
    axes.set_xlim(0, width)
    axes.set_ylim(1, 0)
    samples = [(style.name, list(_boxes_at(Action(0, kind, -1), (0, 0.26), 0.1, 0.8)))
               for kind, style in STYLES.items() if kind in kinds]  # fmt: skip
    if kinds - COMPUTE:
        samples.append(("messages", [(_box((0, 0.26), 0.1, 0.9), _MESSAGE)]))
    samples.append(("idle", [(_box((0, 0.26), 0.1, 0.9), _IDLE)]))
    left = 0.0
    for name, boxes in samples:
        for corners, fill in boxes:
            axes.add_collection(PolyCollection([[(x + left, y) for x, y in corners]], facecolors=fill))
        axes.text(left + 0.34, 0.5, name, fontsize=8, va="center")
        left += 0.34 + 0.075 * len(name) + 0.25
