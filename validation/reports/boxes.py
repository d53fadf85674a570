"""What a timeline looks like: coloured boxes and letters, in coordinates of time and of ranks.

A microbatch has a colour, and a kind of action its way of wearing it: a forward is pale, a backward full, and of its
two halves the input's has a full upper edge and the weights' a full lower one. Sends and receives are dark. What is not
covered is idle.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pipeline.action import Kind
from pipeline.trace import Span

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
