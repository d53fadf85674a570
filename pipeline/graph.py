"""What comes before what: order, longest paths and shortest cycles of large directed graphs, layer by layer.

A layer is every node whose predecessors are all done, so a walk takes as many array operations as the longest path has
nodes, and work linear in nodes and edges (Kahn, Topological sorting of large networks, 1962).
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeproof.pipeline.columns import Floats, Ints, Mask

_MOST_STEPS = 2_000_000


@dataclass(frozen=True, eq=False)
class Graph:
    """Nodes 0..size-1, and edges: ``before[e]`` comes before ``after[e]``. Edges may repeat."""

    size: int
    before: NDArray[Any]
    after: NDArray[Any]

    @cached_property
    def _leaving(self) -> tuple[Ints, Ints]:
        """Edges in the order of where they start, and the first of each node's."""
        counts = np.bincount(self.before, minlength=self.size)
        return np.argsort(self.before, kind="stable"), np.concatenate([[0], np.cumsum(counts)])

    def layers(self) -> Iterator[tuple[Ints, Ints]]:
        """Each layer of nodes with the edges that leave it; nodes on a cycle or behind one never come."""
        edges, first = self._leaving
        waits_for = np.bincount(self.after, minlength=self.size)
        place = np.empty(self.size, dtype=np.int64)  # of a node among those that became free with it
        layer = np.flatnonzero(waits_for == 0)
        while len(layer):
            leaving = edges[_ranges(first[layer], first[layer + 1])]
            yield layer, leaving
            reached = self.after[leaving]
            np.subtract.at(waits_for, reached, 1)
            free = reached[waits_for[reached] == 0]
            place[free] = places = np.arange(len(free))
            layer = free[place[free] == places]  # each once

    def reached(self) -> Mask:
        """Which nodes come in some layer: all of them where there is no cycle."""
        seen = np.zeros(self.size, dtype=bool)
        for layer, _ in self.layers():
            seen[layer] = True
        return seen

    def starts(self, durations: Floats, delays: Floats) -> tuple[Floats, Mask]:
        """The earliest start of every node, and which nodes can start at all.

        A node takes ``durations[node]``, and ``delays[edge]`` passes between the two ends of an edge.
        """
        starts = np.zeros(self.size)
        seen = np.zeros(self.size, dtype=bool)
        for layer, leaving in self.layers():
            seen[layer] = True
            source = self.before[leaving]
            np.maximum.at(starts, self.after[leaving], starts[source] + durations[source] + delays[leaving])
        return starts, seen

    def critical_path(self, starts: Floats, durations: Floats, delays: Floats) -> list[int]:
        """Nodes without slack in between, up to the one that ends last, for ``starts`` as computed above."""
        if not self.size:
            return []
        arrives = starts[self.before] + durations[self.before] + delays
        tight = starts[self.after] == arrives
        held_up_by = np.full(self.size, -1)
        held_up_by[self.after[tight]] = self.before[tight]
        path = [int((starts + durations).argmax())]
        while (cause := int(held_up_by[path[-1]])) >= 0:
            path.append(cause)
        return path[::-1]

    def shortest_cycle(self, within: Mask) -> list[int]:
        """A cycle of fewest nodes among those of ``within``, from its smallest node on; [] where there is none.

        A breadth-first search from every such node, each cut off at the best length so far. Where that takes more than
        ``_MOST_STEPS`` steps, which is some seconds, it is the best found until then.
        """
        inside = within[self.before] & within[self.after]
        following: dict[int, list[int]] = {}
        for source, target in zip(self.before[inside].tolist(), self.after[inside].tolist(), strict=True):
            following.setdefault(source, []).append(target)
        best: list[int] = []
        steps = 0
        for node in _on_cycles(following):
            cycle, taken = _cycle_from(node, following, shorter_than=len(best))
            best, steps = cycle or best, steps + taken
            if best and steps > _MOST_STEPS:
                break
        return best


def _ranges(first: Ints, last: Ints) -> Ints:
    """first[0]..last[0]-1, first[1]..last[1]-1 and so on, as one array."""
    counts = last - first
    ends: Ints = counts.cumsum()
    each: Ints = (first - ends + counts).repeat(counts)
    return each + np.arange(ends[-1])


def _on_cycles(following: Mapping[int, list[int]]) -> list[int]:
    """The nodes that have a way on for ever: what is left after dead ends are taken away again and again."""
    onward = {node: len(targets) for node, targets in following.items()}
    sources: dict[int, list[int]] = {}
    for node, targets in following.items():
        for target in targets:
            sources.setdefault(target, []).append(node)
    ended = [node for node in sources if node not in onward]
    while ended:
        for source in sources.get(ended.pop(), ()):
            onward[source] -= 1
            if not onward[source]:
                ended.append(source)
    return sorted(node for node, count in onward.items() if count > 0)


def _cycle_from(start: int, following: Mapping[int, list[int]], *, shorter_than: int) -> tuple[list[int], int]:
    """The shortest cycle through ``start``, if it has fewer than ``shorter_than`` nodes (0: no bound), else [].

    With it, how many nodes were seen on the way.
    """
    came_from = {start: start}
    depth = {start: 1}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        if shorter_than and depth[node] >= shorter_than:
            break
        for target in following.get(node, ()):
            if target == start:
                return _path(node, came_from), len(came_from)
            if target not in came_from:
                came_from[target], depth[target] = node, depth[node] + 1
                queue.append(target)
    return [], len(came_from)


def _path(node: int, came_from: Mapping[int, int]) -> list[int]:
    path = [node]
    while came_from[path[-1]] != path[-1]:
        path.append(came_from[path[-1]])
    return path[::-1]
