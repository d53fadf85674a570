"""Colours of pictures: a hue per kind of action, a shade per stage of a rank, and red for what is wrong."""

from collections.abc import Mapping

from pipeproof.pipeline.action import Kind

WHITE, BLACK = "#ffffff", "#000000"  # one of the two can be read on any colour
IDLE, MESSAGE, WRONG = "#ececec", "#23282e", "#d3121f"
# The darkest and the palest of a hue, told apart by eyes that lack one of the three cones, too: of lightness 0.58 and
# 0.82 in OKLCH (B. Ottosson's perceptual space, bottosson.github.io/posts/oklab), B and I a little lighter, W darker.
_KINDS: Mapping[Kind, tuple[str, str]] = {
    Kind.FORWARD: ("#5d74c7", "#aec2fc"),
    Kind.BACKWARD: ("#16a384", "#7af1ce"),
    Kind.BACKWARD_INPUT: ("#ad7c0e", "#fec766"),
    Kind.BACKWARD_WEIGHT: ("#a5397e", "#f784c8"),
}


def colour_of(kind: Kind, place: int = 0, *, places: int = 1, stressed: bool = False) -> str:
    """An action of ``kind`` on the ``place``-th of a rank's ``places`` stages: the first is darkest.

    ``stressed`` is darker than any that is not.
    """
    if kind not in _KINDS:
        return MESSAGE
    darkest, palest = _KINDS[kind]
    if stressed:
        return mixed(darkest, BLACK, 0.45)
    return mixed(darkest, palest, place / (places - 1) if places > 1 else 0.5)


def letters_on(colour: str) -> str:
    """Black or white: what is read more easily on ``colour``, by the contrast ratio of WCAG 2."""
    linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in _parts(colour))
    luminance = sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return BLACK if (luminance + 0.05) ** 2 >= 1.05 * 0.05 else WHITE


def mixed(colour: str, other: str, share: float) -> str:
    """``colour`` with so much of ``other`` in it."""
    parts = zip(_parts(colour), _parts(other), strict=True)
    return "#" + "".join(f"{round(255 * (one + (two - one) * share)):02x}" for one, two in parts)


def _parts(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
