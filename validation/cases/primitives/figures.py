"""How each primitive was validated here: figures that ``ci/primitives`` measures and keeps in ``figures.json``."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files


@dataclass(frozen=True)
class Figures:
    """A primitive alone, on the smallest mesh, with so many seeds of weights and data.

    parameters: how many gradients were compared each time. worst: the largest relative error of any; floor: what
    rounding did to that one.
    """

    ranks: int
    seeds: int
    passed: int
    parameters: int
    worst: float
    floor: float
    torch: str


def figures() -> Mapping[str, Figures]:
    """By the names of primitives."""
    text = files(__package__).joinpath("figures.json").read_text(encoding="utf-8")
    return {name: Figures(**one) for name, one in json.loads(text).items()}
