"""Colours of pictures and pages: a hue per kind of action, a shade per stage of a rank, and red for what is wrong.

Colours are made in OKLCH, B. Ottosson's perceptual space (bottosson.github.io/posts/oklab), where a step of lightness
looks the same in every hue.
"""

from collections.abc import Mapping
from math import cos, radians, sin
from typing import NamedTuple

from pipeproof.pipeline.action import Kind


class Shade(NamedTuple):
    """A colour: lightness from 0 to 1, chroma from 0 (grey) to some 0.3, hue in degrees."""

    lightness: float
    chroma: float
    hue: float

    @property
    def rgb(self) -> tuple[float, float, float]:
        """sRGB from 0 to 1; of a colour that no screen shows, the nearest of less chroma."""
        red, green, blue = _linear(self)
        if self.chroma > 0 and not all(-1e-4 <= part <= 1 + 1e-4 for part in (red, green, blue)):
            return self._replace(chroma=max(0.0, self.chroma - 0.005)).rgb
        return _encoded(red), _encoded(green), _encoded(blue)

    @property
    def hex(self) -> str:
        """``#rrggbb``."""
        return "#" + "".join(f"{round(part * 255):02x}" for part in self.rgb)


def _linear(shade: Shade) -> tuple[float, float, float]:
    a, b = (shade.chroma * turn(radians(shade.hue)) for turn in (cos, sin))
    long = (shade.lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    middle = (shade.lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (shade.lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * middle + 1.7076147010 * short,
    )


def _encoded(part: float) -> float:
    part = min(1.0, max(0.0, part))
    return 12.92 * part if part <= 0.0031308 else 1.055 * part ** (1 / 2.4) - 0.055


WHITE, BLACK = "#ffffff", "#000000"  # one of the two can be read on any colour
IDLE, MESSAGE, WRONG = "#ececec", "#23282e", "#d3121f"
# Hue, chroma, and how much lighter than the rest: told apart by eyes that lack one of the three cones, too.
_KINDS: Mapping[Kind, tuple[float, float, float]] = {
    Kind.FORWARD: (270, 0.13, 0.0),
    Kind.BACKWARD: (172, 0.12, 0.06),
    Kind.BACKWARD_INPUT: (80, 0.15, 0.04),
    Kind.BACKWARD_WEIGHT: (345, 0.16, -0.06),
}
_DARKEST, _PALEST, _ALONE, _STRESSED = 0.58, 0.82, 0.70, 0.38


def colour_of(kind: Kind, place: int = 0, *, places: int = 1, stressed: bool = False) -> str:
    """An action of ``kind`` on the ``place``-th of a rank's ``places`` stages: the first is darkest.

    ``stressed`` is darker than any that is not.
    """
    if kind not in _KINDS:
        return MESSAGE
    hue, chroma, lighter = _KINDS[kind]
    step = place / (places - 1) if places > 1 else 0.0
    lightness = _DARKEST + step * (_PALEST - _DARKEST) if places > 1 else _ALONE
    return Shade(_STRESSED if stressed else lightness + lighter, chroma, hue).hex


def letters_on(colour: str) -> str:
    """Black or white: what is read more easily on ``colour``."""
    return max((BLACK, WHITE), key=lambda letters: contrast(letters, colour))


def contrast(one: str, other: str) -> float:
    """The contrast ratio of two colours after WCAG 2, from 1 to 21."""
    dark, light = sorted(map(_luminance, (one, other)))
    return (light + 0.05) / (dark + 0.05)


def faded(colour: str, share: float) -> str:
    """``colour`` with so much white in it."""
    return mixed(colour, WHITE, share)


def mixed(colour: str, other: str, share: float) -> str:
    """``colour`` with so much of ``other`` in it."""
    parts = zip(_parts(colour), _parts(other), strict=True)
    return "#" + "".join(f"{round(255 * (one + (two - one) * share)):02x}" for one, two in parts)


def _luminance(colour: str) -> float:
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in _parts(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _parts(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
