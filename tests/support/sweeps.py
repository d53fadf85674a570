"""Sweeps: of many variants that show one thing a few are tests of every change, and ``ci/sweep`` runs the others."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from types import MappingProxyType
from typing import Any

import pytest

SWEEP = pytest.mark.sweep


def some(variants: Iterable[Any], left: Collection[Any]) -> list[Any]:
    """``variants`` as parameters, those ``left`` for a sweep marked."""
    return [pytest.param(one, marks=SWEEP if one in left else ()) for one in variants]


def sampled(variants: Iterable[Any], step: int, *, open_: Mapping[str, str] = MappingProxyType({})) -> list[Any]:
    """``variants`` as parameters: each ``step``-th is a test of every change, from the first on.

    ``open_``: those that are known to fail, with the reason; one that passes again fails its test.
    """

    def marks(number: int, one: Any) -> list[Any]:
        why = [pytest.mark.xfail(reason=open_[one], strict=True)] if isinstance(one, str) and one in open_ else []
        return [*([SWEEP] if number % step else []), *why]

    return [pytest.param(one, marks=marks(number, one)) for number, one in enumerate(variants)]


def each_once(**axes: Sequence[Any] | Mapping[Any, Any]) -> tuple[tuple[str, ...], list[Any]]:
    """What ``parametrize`` takes: every combination. A test of every change has each value of each axis at least once.

    The values of the longest axis are met by those of the others in turn.
    """
    every = [list(values) for values in axes.values()]
    longest = max(map(len, every))
    met = {tuple(values[k % len(values)] for values in every) for k in range(longest)}
    return tuple(axes), [pytest.param(*one, marks=() if one in met else SWEEP) for one in product(*every)]
