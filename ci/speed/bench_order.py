"""Whether things come in the order that a prediction puts them in."""

from collections.abc import Mapping
from itertools import combinations, pairwise

_SAME = 1e-9  # relative: what is predicted to be as near as this is predicted to be equal


def out_of_order(measured: Mapping[str, float], predicted: Mapping[str, float]) -> list[tuple[str, str]]:
    """The pairs (less, more) by prediction that were measured the other way round, or alike; equals may come anyhow."""
    by_prediction = sorted(predicted, key=predicted.__getitem__)
    return [
        (less, more)
        for less, more in combinations(by_prediction, 2)
        if not _alike(predicted[less], predicted[more]) and measured[less] >= measured[more]
    ]


def chain(values: Mapping[str, float]) -> str:
    """The names in order, as ``a < b = c < d``."""
    names = sorted(values, key=values.__getitem__)
    text = names[0]
    for before, name in pairwise(names):
        text += f" {'=' if _alike(values[before], values[name]) else '<'} {name}"
    return text


def _alike(one: float, other: float) -> bool:
    return abs(one - other) <= _SAME * max(abs(one), abs(other))
