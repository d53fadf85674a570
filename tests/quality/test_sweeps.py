"""Of many variants a few are tests of every change, and all others are marked for a sweep."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.golden import COLLECTED

MOST = 290  # functions that start ranks or processes in ci/test; the number only goes down


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", range(5))
def test_each_second_is_of_every_change(number: int, request: pytest.FixtureRequest) -> None:
    own = [one for one in request.config.stash[COLLECTED] if one.name.startswith(f"{request.node.originalname}[")]
    marked = [one.get_closest_marker("sweep") is not None for one in own]
    assert marked == [bool(k % 2) for k in range(len(own))]
    assert len(own) in (1, 5), "who names one variant has that alone"


def start_ranks(items: Iterable[Any]) -> set[str]:
    """The functions that start ranks or processes at every change; those of frameworks run elsewhere."""
    return {
        one.nodeid.partition("[")[0]
        for one in items
        if one.get_closest_marker("pipeproof_ranks") is not None
        and one.get_closest_marker("sweep") is None
        and not one.nodeid.startswith("tests/frameworks/")
    }


def test_few_functions_start_ranks_at_every_change(request: pytest.FixtureRequest) -> None:
    found = start_ranks(request.config.stash[COLLECTED])
    assert len(found) <= MOST, "check values without ranks, join a table, or mark it sweep"


def test_functions_that_start_ranks_are_counted_once_and_without_those_of_the_sweep() -> None:
    def item(nodeid: str, *marks: str) -> Any:
        return SimpleNamespace(nodeid=nodeid, get_closest_marker=lambda name: name if name in marks else None)

    ranks = "pipeproof_ranks"
    items = [item("a.py::test_a[1]", ranks), item("a.py::test_a[2]", ranks), item("a.py::test_b[x[y]]", ranks, "sweep")]
    items += [item("a.py::test_c"), item("tests/frameworks/b.py::test_d", ranks), item("a.py::test_e", ranks)]
    assert start_ranks(items) == {"a.py::test_a", "a.py::test_e"}
