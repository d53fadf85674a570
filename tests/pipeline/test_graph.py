"""Order, longest paths and shortest cycles, each against a plain way to find them."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeproof.pipeline.graph import Graph

SIZE = 6
edges = st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(0, SIZE - 1)), max_size=14)


def graph(pairs: list[tuple[int, int]], size: int = SIZE) -> Graph:
    return Graph(size, np.array([a for a, _ in pairs], dtype=int), np.array([b for _, b in pairs], dtype=int))


def loops(pairs: list[tuple[int, int]]) -> set[int]:
    """The lengths of all simple cycles, by trying every order of every set of nodes."""
    found = set()
    for length in range(1, SIZE + 1):
        for nodes in permutations(range(SIZE), length):
            if all(pair in pairs for pair in zip(nodes, [*nodes[1:], nodes[0]], strict=True)):
                found.add(length)
                break
    return found


@given(edges)
@settings(max_examples=60)
def test_layers_and_cycles(pairs: list[tuple[int, int]]) -> None:
    observed: list[int] = []
    for layer, leaving in graph(pairs).layers():
        assert all(a in observed for node in layer for a, b in pairs if b == node)
        assert sorted(pairs[edge] for edge in leaving) == sorted(pair for pair in pairs if pair[0] in layer)
        observed += layer.tolist()
    lengths = loops(pairs)
    assert len(set(observed)) == len(observed)
    assert (len(observed) == SIZE) is not bool(lengths)
    cycle = graph(pairs).shortest_cycle(~graph(pairs).reach())
    assert len(cycle) == min(lengths, default=0)
    assert all(pair in pairs for pair in zip(cycle, [*cycle[1:], *cycle[:1]], strict=True))


def test_a_search_that_would_take_for_ever_ends_with_the_best_cycle_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    size = 500
    ring = [(node, (node + 1) % size) for node in range(size)]
    short = [(size - 2, size - 3)]  # found only from the far end
    assert graph([*ring, *short], size).shortest_cycle(np.ones(size, dtype=bool)) == [size - 3, size - 2]
    monkeypatch.setattr("pipeproof.pipeline.graph._MOST_STEPS", 1000)
    assert graph([*ring, *short], size).shortest_cycle(np.ones(size, dtype=bool)) == list(range(size))


def test_the_longest_path() -> None:
    diamond = graph([(0, 1), (0, 2), (1, 3), (2, 3)], 4)
    durations, delays = np.array([1.0, 5.0, 2.0, 1.0]), np.array([0.0, 0.0, 0.5, 4.0])
    starts, reached = diamond.starts(durations, delays)
    assert reached.all()
    assert starts.tolist() == [0, 1, 1, 7]
    assert diamond.critical_path(starts, durations, delays) == [0, 2, 3]


@pytest.mark.parametrize("size", [0, 1])
def test_graphs_without_edges(size: int) -> None:
    empty = graph([], size)
    starts, reached = empty.starts(np.ones(size), np.zeros(0))
    assert reached.all()
    assert empty.critical_path(starts, np.ones(size), np.zeros(0)) == [0] * size
    assert empty.shortest_cycle(~reached) == []
