"""Colours: a hue per kind of action, a shade per stage of a rank, red for errors, a step per error size."""

import math
from collections.abc import Mapping

from pipeproof.pipeline.action import Kind

WHITE, BLACK = "#ffffff", "#000000"  # one of the two can be read on any colour
IDLE, MESSAGE, WRONG = "#ececec", "#23282e", "#d3121f"
# The darkest and the palest of a hue, distinct to eyes that lack one of the three cones, too: of lightness 0.58 and
# 0.82 in OKLCH (B. Ottosson's perceptual space, bottosson.github.io/posts/oklab), B and I a little lighter, W darker.
_KINDS: Mapping[Kind, tuple[str, str]] = {
    Kind.FORWARD: ("#5d74c7", "#aec2fc"),
    Kind.BACKWARD: ("#16a384", "#7af1ce"),
    Kind.BACKWARD_INPUT: ("#ad7c0e", "#fec766"),
    Kind.BACKWARD_WEIGHT: ("#a5397e", "#f784c8"),
}
# The colours of errors, from the smallest to the largest; ``templates/page.css`` has them.
STEPS = ("x", "a3", "a2", "a1", "a0", "w0", "w1", "w2", "w3", "w4")


def colour_of(kind: Kind, place: int = 0, *, places: int = 1, stressed: bool = False) -> str:
    """Colour an action of ``kind`` on the ``place``-th of a rank's ``places`` stages: the first is darkest.

    ``stressed`` is darker than any other.
    """
    if kind not in _KINDS:
        return MESSAGE
    darkest, palest = _KINDS[kind]
    if stressed:
        return mix(darkest, BLACK, 0.45)
    return mix(darkest, palest, place / (places - 1) if places > 1 else 0.5)


def letters_on(colour: str) -> str:
    """Black or white: the more readable on ``colour``, by the contrast ratio in WCAG 2."""
    linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in _parts(colour))
    luminance = sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return BLACK if (luminance + 0.05) ** 2 >= 1.05 * 0.05 else WHITE


def mix(colour: str, other: str, share: float) -> str:
    """Mix in a ``share`` from ``other``."""
    parts = zip(_parts(colour), _parts(other), strict=True)
    return "#" + "".join(f"{round(255 * (one + (two - one) * share)):02x}" for one, two in parts)


def decades(error: float, limit: float) -> float:
    """The power of ten of ``error`` over ``limit``, at most 12 either way; NaN counts as far above."""
    ratio = 1.0 if error == limit else (error / limit if limit else math.inf)
    if not 0 < ratio < math.inf:
        return 12.0 if ratio else -12.0
    return max(-12.0, min(12.0, math.log10(ratio)))


def step_of(error: float | None, limit: float | None) -> str:
    """Colour an error: ``x`` bit for bit, ``a0`` to ``a3`` within rounding, ``w0`` to ``w4`` above."""
    if error == 0:
        return "x"
    if error is None or limit is None:
        return ""
    powers = int(abs(decades(error, limit)))
    return f"a{min(3, powers)}" if error <= limit else f"w{min(4, powers)}"


def _parts(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
