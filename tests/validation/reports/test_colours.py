"""Colours can be told apart, by numbers: distances in OKLab, of which eyes see some 0.02.

Eyes that lack a kind of cone see as G. M. Machado et al. (2009) compute.
"""

from itertools import combinations, pairwise

import numpy as np
import pytest

from pipeproof.pipeline import Kind
from pipeproof.reports.colours import BLACK, IDLE, MESSAGE, WHITE, WRONG, colour_of, letters_on, mix, step_of

KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
EYES = {
    "all cones": np.eye(3),
    "no long": np.array([[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]]),
    "no middle": np.array([[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]]),
    "no short": np.array([[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]]),
}
_CONES = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]])
_OKLAB = np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])


def linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2, from 1 to 21."""
    dark, light = sorted(float(linear(colour) @ (0.2126, 0.7152, 0.0722)) + 0.05 for colour in (one, other))
    return light / dark


def observed(colour: str, eyes: str) -> np.ndarray:
    return np.asarray(_OKLAB @ np.cbrt(_CONES @ np.clip(EYES[eyes] @ linear(colour), 0, 1)))


def distance(one: str, other: str, eyes: str = "all cones") -> float:
    return float(np.linalg.norm(observed(one, eyes) - observed(other, eyes)))


@pytest.mark.parametrize("eyes", EYES)
@pytest.mark.parametrize("places", [1, 2])
def test_colours_differ_for_all_eyes(places: int, eyes: str) -> None:
    shades = [colour_of(kind, place, places=places) for kind in KINDS for place in range(places)]
    assert min(distance(*pair, eyes) for pair in combinations(shades, 2)) > (0.15 if eyes == "all cones" else 0.07)


@pytest.mark.parametrize("places", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_stages_of_a_rank_grow_paler(kind: Kind, places: int) -> None:
    shades = [colour_of(kind, place, places=places) for place in range(places)]
    assert min(distance(*pair) for pair in pairwise(shades)) > 0.03
    assert shades == sorted(shades, key=lambda colour: contrast(BLACK, colour))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_stressed_is_darker_than_anything_else(kind: Kind) -> None:
    darkest = min((colour_of(kind, place, places=8) for place in range(8)), key=lambda colour: contrast(BLACK, colour))
    assert distance(colour_of(kind, stressed=True), darkest) > 0.1


def test_red_is_nothing_elses_colour() -> None:
    others = [mix(colour_of(kind, place, places=2), WHITE, 0.6) for kind in KINDS for place in (0, 1)]
    assert min(distance(WRONG, other) for other in [*others, MESSAGE, IDLE, WHITE]) > 0.25


@pytest.mark.parametrize("places", [1, 2, 3, 4, 8])
def test_names_can_be_read_on_every_colour(places: int) -> None:
    shades = [colour_of(kind, place, places=places) for kind in KINDS for place in range(places)]
    assert all(contrast(letters_on(colour), colour) >= 4.5 for colour in [*shades, WRONG])


@pytest.mark.parametrize(
    ("error", "limit", "step"),
    [
        (0.0, None, "x"),
        (1e-6, 1e-6, "a0"),
        (1e-8, 1e-6, "a2"),
        (1e-30, 1e-6, "a3"),
        (2e-6, 1e-6, "w0"),
        (2e-5, 1e-6, "w1"),
        (float("inf"), 1e-6, "w4"),
        (1.0, 0.0, "w4"),
        (float("nan"), 1e-6, "w4"),
        (None, 1e-6, ""),
        (0.1, None, ""),
    ],
)
def test_a_colour_is_a_power_of_ten(error: float | None, limit: float | None, step: str) -> None:
    assert step_of(error, limit) == step
