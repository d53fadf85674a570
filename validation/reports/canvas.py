"""Elements of a picture, and their files: SVG from a template, PNG by matplotlib.

Lengths are points, 1/72 inch, to the right and downwards. matplotlib is the extra ``plot``: only this file imports it,
on demand.
"""

import importlib.util
import io
from dataclasses import dataclass
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pipeproof.reports.colours import BLACK, WHITE
from pipeproof.reports.template import render

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 160
# How wide letters of DejaVu Sans are, as parts of their size: of names of actions exactly, of the rest in the middle.
_WIDTHS = {**dict.fromkeys("0123456789", 0.637), "F": 0.576, "B": 0.687, "I": 0.295, "W": 0.989, " ": 0.318}
_OTHER = 0.62


class PictureError(ValueError):
    """A picture beyond drawing."""


class Box(NamedTuple):
    """A rectangle. ``says`` appears under the pointer; an empty ``fill`` or ``edge`` means none."""

    left: float
    top: float
    width: float
    height: float
    fill: str
    edge: str = ""
    edge_width: float = 0.0
    says: str = ""


class Text(NamedTuple):
    """Text at ``left``, or around or up to it; ``middle``: half its height."""

    text: str
    left: float
    middle: float
    size: float
    anchor: Literal["start", "middle", "end"] = "start"
    colour: str = BLACK
    bold: bool = False


@dataclass(frozen=True)
class Drawing:
    """Boxes from the ground up, with text above; ``says`` describes the picture to readers who cannot see it."""

    width: float
    height: float
    boxes: tuple[Box, ...]
    texts: tuple[Text, ...]
    says: str = ""


def text_width(text: str, size: float) -> float:
    """The width of ``text`` in points."""
    return size * sum(_WIDTHS.get(letter, _OTHER) for letter in text)


def check_drawable() -> None:
    """Raise ``PictureError`` without a library for PNG."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PictureError("a PNG needs matplotlib, which the extra 'plot' brings: pip install 'pipeproof[plot]'")


def svg(drawing: Drawing) -> bytes:
    """Render ``drawing`` as SVG: text stays text, boxes carry descriptions. Equal drawings, equal bytes."""
    return render("drawing.svg", drawing=drawing).encode()


def png(drawing: Drawing) -> bytes:
    """``drawing`` as PNG. Equal drawings, equal bytes."""
    file = io.BytesIO()
    figure(drawing).savefig(file, format="png", dpi=_DPI)
    return file.getvalue()


def figure(drawing: Drawing) -> "Figure":
    """Convert ``drawing`` to matplotlib: one panel over the whole figure, in points."""
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure

    made = Figure(figsize=(drawing.width / 72, drawing.height / 72), facecolor=WHITE)
    axes = made.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.set_xlim(0, drawing.width)
    axes.set_ylim(drawing.height, 0)
    corners = [
        [(left, top), (left + width, top), (left + width, top + height), (left, top + height)]
        for left, top, width, height, *_ in drawing.boxes
    ]
    looks: dict[str, Any] = {
        "facecolors": [box.fill or "none" for box in drawing.boxes],
        "edgecolors": [box.edge or "none" for box in drawing.boxes],
        "linewidths": [box.edge_width for box in drawing.boxes],
    }
    axes.add_collection(PolyCollection(corners, **looks))
    sides = {"start": "left", "middle": "center", "end": "right"}
    for text in drawing.texts:
        look: dict[str, Any] = {
            "color": text.colour,
            "weight": "bold" if text.bold else "normal",
            "family": "DejaVu Sans",
        }
        look |= {"ha": sides[text.anchor], "va": "center_baseline", "parse_math": False}
        axes.text(text.left, text.middle, text.text, fontsize=text.size, **look)
    return made


def wrap_text(text: str, *, width: float, size: float) -> list[str]:
    """Break ``text`` at spaces into lines of ``width`` points."""
    return wrap(text, int(width / (_WIDTHS["0"] * size)))
