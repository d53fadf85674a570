"""Timelines as files: pictures, and a Chrome trace. All are refused before anything runs, or written.

In a picture ranks go from top to bottom, time from left to right, one panel above the other. A microbatch has a colour,
and a kind of action its way of wearing it: a forward is pale, a backward full, and of its two halves the input's has a
full upper edge and the weights' a full lower one. Sends and receives are dark. What is not covered is idle.

They are drawn by matplotlib, which is the extra ``plot``: it is imported here alone, when something is drawn.
"""

import importlib.util
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple, Self

from pipeproof.pipeline.action import COMPUTE, Kind
from pipeproof.pipeline.chrome_trace import chrome_trace
from pipeproof.pipeline.trace import Span, Trace
from pipeproof.worlds.output_file import OutputError, OutputFile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


COLOURS = ("#2f6fbf", "#dd7a1a", "#2c9a4b", "#c23b3b", "#7d55b5", "#8f5d33", "#d052a2", "#5d6a78", "#92921a", "#159cae")
MESSAGE, IDLE, SAMPLE = "#23282e", "#ececec", "#6b6b6b"
HALF = 0.42  # half of a box's height, where ranks are 1 apart
_PALE = 0.62  # how much white is in a pale colour
_EDGE = 0.36  # the part of its height that half a backward has in full colour
_DARK_LETTERS, _LIGHT_LETTERS = "#1b1b1b", "#ffffff"


class Style(NamedTuple):
    """How a kind wears a colour: from where to where of its height in full, where its letters are, and their colour.

    Heights are from 0, the upper edge, to 1.
    """

    name: str
    full: tuple[float, float]
    middle: float
    letters: str


STYLES: Mapping[Kind, Style] = {
    Kind.FORWARD: Style("F  forward", (0, 0), 0.5, _DARK_LETTERS),
    Kind.BACKWARD: Style("B  backward", (0, 1), 0.5, _LIGHT_LETTERS),
    Kind.BACKWARD_INPUT: Style("I  input gradient", (0, _EDGE), (1 + _EDGE) / 2, _DARK_LETTERS),
    Kind.BACKWARD_WEIGHT: Style("W  weight gradients", (1 - _EDGE, 1), (1 - _EDGE) / 2, _DARK_LETTERS),
}


class Box(NamedTuple):
    """A rectangle: time from ``left`` to ``right``, ranks from ``top`` down to ``bottom``."""

    left: float
    right: float
    top: float
    bottom: float
    colour: str


class Letters(NamedTuple):
    """Text around the point (time ``x``, rank ``y``)."""

    text: str
    x: float
    y: float
    colour: str


def boxes(span: Span) -> Iterator[Box]:
    """The boxes of a span's work, from the ground up; its wait is left idle."""
    if span.worked > 0:
        colour = COLOURS[span.action.microbatch % len(COLOURS)]
        yield from painted(span.action.kind, colour, Box(span.worked_from, span.ended, *_rows(span), ""))


def painted(kind: Kind, colour: str, area: Box) -> Iterator[Box]:
    """``area`` as an action of ``kind`` in ``colour``."""
    style = STYLES.get(kind)
    if style is None:
        yield area._replace(colour=MESSAGE)
        return
    yield area._replace(colour=_pale(colour))
    start, end = style.full
    if end > start:
        height = area.bottom - area.top
        yield area._replace(top=area.top + start * height, bottom=area.top + end * height, colour=colour)


def letters(span: Span, *, width: float) -> Letters | None:
    """The most of the action's name that fits, if a letter takes ``width`` of time: ``2F0``, ``F0``, ``0`` or None."""
    style = STYLES.get(span.action.kind)
    if style is None:
        return None
    stage, kind, microbatch = span.action
    fitting = (name for name in (f"{stage}{kind}{microbatch}", f"{kind}{microbatch}", f"{microbatch}")
               if len(name) * width <= span.worked)  # fmt: skip
    text = next(fitting, None)
    if text is None:
        return None
    top, bottom = _rows(span)
    return Letters(text, (span.worked_from + span.ended) / 2, top + style.middle * (bottom - top), style.letters)


def _rows(span: Span) -> tuple[float, float]:
    return span.rank - HALF, span.rank + HALF


def _pale(colour: str) -> str:
    parts = (int(colour[k : k + 2], 16) for k in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * _PALE):02x}" for part in parts)


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
            if path not in (None, "-") and not str(path).lower().endswith(str(ending)):
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
