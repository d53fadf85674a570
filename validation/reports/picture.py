"""Timelines as pictures: ranks from top to bottom, time from left to right, one panel above the other.

They are drawn by matplotlib, which is the extra ``plot``: it is imported here alone, when something is drawn.
"""

import importlib.util
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pipeline.action import COMPUTE, Kind
from pipeline.trace import Span, Trace
from validation.reports.boxes import HALF, IDLE, MESSAGE, SAMPLE, STYLES, Box, boxes, letters, painted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 20_000  # actions; a picture of more has no pixels for each of them

_LETTER_PT, _LETTER_WIDTH = 7.5, 0.64  # a letter's height, and its width as a part of that
_CELL_IN, _WIDTHS_IN = 0.33, (8.0, 24.0)  # one of the shorter actions, and all of them at least and at most
_ROW_IN, _ROWS_IN = 0.36, 120.0  # a rank, and all of them at most
_LEFT_IN, _RIGHT_IN, _TOP_IN, _BETWEEN_IN, _BOTTOM_IN = 0.7, 0.25, 0.75, 0.5, 0.5


class PictureError(ValueError):
    """A picture that cannot be drawn."""


class Layout(NamedTuple):
    """Sizes in inches. ``room`` is the width of a panel, which shows the time from 0 to ``end``."""

    width: float
    height: float
    room: float
    row: float
    end: float

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> "Layout":
        """Room for every action's name, within reason."""
        cells = max((trace.makespan / _shorter(trace) for trace in traces if _shorter(trace)), default=0.0)
        width = min(max(cells * _CELL_IN, _WIDTHS_IN[0]), _WIDTHS_IN[1])
        rows = sum(len(trace.spans) for trace in traces)
        row = min(_ROW_IN, _ROWS_IN / rows)
        height = _TOP_IN + rows * row + _BETWEEN_IN * (len(traces) - 1) + _BOTTOM_IN
        return cls(width, height, width - _LEFT_IN - _RIGHT_IN, row, max(trace.makespan for trace in traces))

    def frame(self, top: float, height: float) -> tuple[float, float, float, float]:
        """Left, bottom, width and height of a strip ``top`` inches below the upper edge, as parts of the figure."""
        bottom = self.height - top - height
        return _LEFT_IN / self.width, bottom / self.height, self.room / self.width, height / self.height

    @property
    def letter(self) -> float:
        """The time that a letter's width stands for."""
        return _LETTER_PT / 72 * _LETTER_WIDTH * self.end / self.room


def check_drawable(actions: int) -> None:
    """Raise ``PictureError`` unless so many actions can be drawn, and there is something to draw them with."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PictureError("a picture needs matplotlib, which the extra 'plot' brings: pip install 'pipeproof[plot]'")
    if actions > MOST:
        raise PictureError(f"a picture of {actions} actions: expected at most {MOST}; --trace FILE takes any number")


def picture(panels: Mapping[str, Trace], *, file_format: str) -> bytes:
    """``panels``, by their titles and all in one unit of time, as a file: "svg" or "png". Equal panels, equal bytes."""
    return rendered(lambda: _figure(panels), file_format=file_format)


def rendered(draw: Callable[[], "Figure"], *, file_format: str) -> bytes:
    """What ``draw`` makes, as a file: "svg" or "png". Equal figures, equal bytes."""
    from matplotlib import rc_context

    file = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "pipeproof", "font.family": "sans-serif"}):
        metadata = {"Date": None} if file_format == "svg" else None
        draw().savefig(file, format=file_format, dpi=160, metadata=metadata)
    return file.getvalue()


def _figure(panels: Mapping[str, Trace]) -> "Figure":
    from matplotlib.figure import Figure

    traces = list(panels.values())
    layout = Layout.of(traces)
    figure = Figure(figsize=(layout.width, layout.height), facecolor="white")
    _legend(figure.add_axes(layout.frame(0.14, 0.24)), traces, layout.room)
    top = _TOP_IN
    for title, trace in panels.items():
        height = len(trace.spans) * layout.row
        axes = figure.add_axes(layout.frame(top, height))
        _panel(axes, title, trace, layout)
        top += height + _BETWEEN_IN
    axes.set_xlabel(f"time in {_unit(traces)}", fontsize=8)
    return figure


def _unit(traces: Iterable[Trace]) -> str:
    units = {"milliseconds" if trace.in_seconds else "units of T_F, T_I and T_W" for trace in traces}
    assert len(units) == 1, "panels that share an axis share a unit of time"
    return units.pop()


def _shorter(trace: Trace) -> float:
    """A time that three quarters of the computations take at least."""
    worked = sorted(span.worked for span in _spans([trace]) if span.action.kind in COMPUTE)
    return worked[len(worked) // 4] if worked else 0.0


def _spans(traces: Iterable[Trace]) -> Iterable[Span]:
    return (span for trace in traces for row in trace.spans for span in row)


def _panel(axes: "Axes", title: str, trace: Trace, layout: Layout) -> None:
    count = len(trace.spans)
    axes.set_title(title, loc="left", fontsize=9.5, pad=5)
    axes.spines[:].set_visible(False)
    axes.set_xlim(0, layout.end)
    axes.tick_params(axis="x", length=2, labelsize=7.5)
    if trace.in_seconds:
        axes.xaxis.set_major_formatter(lambda x, _: f"{x * 1e3:g}")
    axes.set_ylim(count - 0.5, -0.5)
    axes.tick_params(axis="y", length=0, labelsize=8)
    named = range(0, count, max(1, round(_ROW_IN / layout.row / 2)))
    axes.set_yticks(named, [f"rank {rank}" for rank in named])
    axes.axvline(trace.makespan, color="#555555", linewidth=0.8, linestyle="dashed")
    ground = [Box(0, trace.makespan, rank - HALF, rank + HALF, IDLE) for rank in range(count)]
    _paint(axes, [*ground, *(box for span in _spans([trace]) for box in boxes(span))])
    if layout.row == _ROW_IN:
        for text, x, y, colour in filter(None, (letters(span, width=layout.letter) for span in _spans([trace]))):
            axes.text(x, y, text, color=colour, fontsize=_LETTER_PT, ha="center", va="center_baseline")


def _paint(axes: "Axes", areas: Sequence[Box]) -> None:
    from matplotlib.collections import PolyCollection

    corners = [[(left, top), (right, top), (right, bottom), (left, bottom)] for left, right, top, bottom, _ in areas]
    fills = [box.colour for box in areas]
    # A message may be thinner than a line.
    edges = ["none" if fill in (MESSAGE, IDLE) else "white" for fill in fills]
    axes.add_collection(PolyCollection(corners, facecolors=fills, edgecolors=edges, linewidths=0.5))


def _legend(axes: "Axes", traces: Iterable[Trace], width: float) -> None:
    """A line with a sample of every kind in ``traces``, without a microbatch's colour; ``width`` in inches."""
    axes.set_axis_off()
    axes.set_xlim(0, width)
    axes.set_ylim(1, 0)
    kinds = {span.action.kind for span in _spans(traces)}
    area = Box(0, 0.26, 0.1, 0.9, IDLE)
    samples = [(style.name, list(painted(kind, SAMPLE, area))) for kind, style in STYLES.items() if kind in kinds]
    if kinds - COMPUTE:
        samples.append(("messages", list(painted(Kind.SEND_F, SAMPLE, area))))
    left = 0.0
    for name, areas in [*samples, ("idle", [area])]:
        _paint(axes, [box._replace(left=box.left + left, right=box.right + left) for box in areas])
        axes.text(left + 0.34, 0.5, name, fontsize=8, va="center")
        left += 0.59 + 0.075 * len(name)
