"""What a picture is made of, and how it becomes a file: SVG is written here, PNG is drawn by matplotlib.

Lengths are points, 1/72 inch, to the right and downwards. matplotlib is the extra ``plot``: it is imported here alone,
when something is drawn.
"""

import importlib.util
import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Literal, NamedTuple

from pipeproof.reports.colours import BLACK, WHITE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 160
_FONTS = "'DejaVu Sans', Verdana, Arial, sans-serif"  # matplotlib's own, and what is as wide or narrower
# How wide letters of DejaVu Sans are, as parts of their size: of names of actions exactly, of the rest in the middle.
_WIDTHS = {**dict.fromkeys("0123456789", 0.637), "F": 0.576, "B": 0.687, "I": 0.295, "W": 0.989, " ": 0.318}
_OTHER = 0.62


class PictureError(ValueError):
    """A picture that cannot be drawn."""


class Box(NamedTuple):
    """A rectangle. ``says`` is shown where the pointer rests on it; an empty ``fill`` or ``edge`` is none."""

    left: float
    top: float
    width: float
    height: float
    fill: str
    edge: str = ""
    edge_width: float = 0.0
    says: str = ""


class Text(NamedTuple):
    """Text at ``left``, or around or up to it; ``middle`` is half of its height."""

    text: str
    left: float
    middle: float
    size: float
    anchor: Literal["start", "middle", "end"] = "start"
    colour: str = BLACK
    bold: bool = False


@dataclass(frozen=True)
class Drawing:
    """Boxes from the ground up, and text upon them; ``says`` tells who cannot see it what it shows."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    texts: tuple[Text, ...]
    says: str = ""


def text_width(text: str, size: float) -> float:
    """The width of ``text`` in points."""
    return size * sum(_WIDTHS.get(letter, _OTHER) for letter in text)


def check_drawable() -> None:
    """Raise ``PictureError`` unless there is something to draw a PNG with."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PictureError("a PNG needs matplotlib, which the extra 'plot' brings: pip install 'pipeproof[plot]'")


def svg(drawing: Drawing) -> bytes:
    """``drawing`` as SVG: text is text, and a box says what it is. Equal drawings, equal bytes."""
    width, height = f"{drawing.width:g}", f"{drawing.height:g}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}pt" height="{height}pt" viewBox="0 0 {width} {height}"'
        f' role="img" font-family="{_FONTS}">',
        f"<title>{escape(drawing.says)}</title>",
        "<style>text{pointer-events:none} rect:hover{stroke:#000;stroke-width:1.5}</style>",
        f'<rect width="{width}" height="{height}" fill="{WHITE}"/>',
        *map(_svg_box, drawing.boxes),
        *map(_svg_text, drawing.texts),
        "</svg>\n",
    ]
    return "\n".join(lines).encode()


def _svg_box(box: Box) -> str:
    edge = f' stroke="{box.edge}" stroke-width="{box.edge_width:g}"' if box.edge else ""
    # A box without a fill lets the pointer through to what it surrounds.
    fill = f'fill="{box.fill}"' if box.fill else 'fill="none" pointer-events="none"'
    left, top, width, height = (f"{round(length, 2):g}" for length in box[:4])
    place = f'x="{left}" y="{top}" width="{width}" height="{height}"'
    inner = f"><title>{escape(box.says)}</title></rect>" if box.says else "/>"
    return f"<rect {place} {fill}{edge}{inner}"


def _svg_text(text: Text) -> str:
    weight = ' font-weight="bold"' if text.bold else ""
    anchor = f' text-anchor="{text.anchor}"' if text.anchor != "start" else ""
    left, line = round(text.left, 2), round(text.middle + _FALL * text.size, 2)
    place = f'x="{left:g}" y="{line:g}" font-size="{text.size:g}"'
    return f'<text {place}{anchor}{weight} fill="{text.colour}">{escape(text.text)}</text>'


_FALL = 0.36  # from the middle of a digit to the line that it stands on, as a part of its size


def png(drawing: Drawing) -> bytes:
    """``drawing`` as PNG. Equal drawings, equal bytes."""
    return rendered(lambda: figure(drawing), file_format="png")


def rendered(draw: Callable[[], "Figure"], *, file_format: str) -> bytes:
    """What ``draw`` makes, as a file: "svg" or "png". Equal figures, equal bytes."""
    from matplotlib import rc_context

    file = io.BytesIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "pipeproof", "font.family": "DejaVu Sans"}):
        metadata = {"Date": None} if file_format == "svg" else None
        draw().savefig(file, format=file_format, dpi=_DPI, metadata=metadata)
    return file.getvalue()


def figure(drawing: Drawing) -> "Figure":
    """``drawing`` for matplotlib: one panel that is the whole figure, in points."""
    from matplotlib.figure import Figure

    made = Figure(figsize=(drawing.width / 72, drawing.height / 72), facecolor=WHITE)
    axes = made.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, drawing.width)
    axes.set_ylim(drawing.height, 0)
    _paint(axes, drawing.boxes)
    sides = {"start": "left", "middle": "center", "end": "right"}
    for text in drawing.texts:
        weight = "bold" if text.bold else "normal"
        line = text.middle + _FALL * text.size
        axes.text(
            text.left, line, text.text, fontsize=text.size, ha=sides[text.anchor], va="baseline", color=text.colour,
            weight=weight, parse_math=False,
        )  # fmt: skip
    return made


def _paint(axes: "Axes", boxes: Sequence[Box]) -> None:
    from matplotlib.collections import PolyCollection

    axes.add_collection(
        PolyCollection(
            [list(_corners(box)) for box in boxes],
            facecolors=[box.fill or "none" for box in boxes],
            edgecolors=[box.edge or "none" for box in boxes],
            linewidths=[box.edge_width for box in boxes],
        )
    )


def _corners(box: Box) -> Iterator[tuple[float, float]]:
    right, bottom = box.left + box.width, box.top + box.height
    yield from ((box.left, box.top), (right, box.top), (right, bottom), (box.left, bottom))


def wrapped(parts: Iterable[str], *, width: float, size: float, between: str) -> list[str]:
    """``parts`` in as few lines of at most ``width`` as they fit in; what is longer than a line is broken at spaces."""
    lines: list[str] = []
    for part in parts:
        longer = f"{lines[-1]}{between}{part}" if lines else part
        if lines and text_width(longer, size) <= width:
            lines[-1] = longer
        elif text_width(part, size) > width and " " in part:
            lines += wrapped(part.split(" "), width=width, size=size, between=" ")
        else:
            lines.append(part)
    return lines
