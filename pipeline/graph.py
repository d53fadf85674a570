"""Precedence in large directed graphs: order, longest paths and shortest cycles, layer by layer.

A layer has every node whose predecessors are all done, so a walk takes as many array operations as the longest path has
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
    """Nodes 0..size-1, and edges: ``before[e]`` precedes ``after[e]``. Edges may repeat."""

    size: int
    before: NDArray[Any]
    after: NDArray[Any]

    @cached_property
    def _leaving(self) -> tuple[Ints, Ints]:
        """Edges sorted by start, and each node's first."""
        counts = np.bincount(self.before, minlength=self.size)
        return np.argsort(self.before, kind="stable"), np.concatenate([[0], np.cumsum(counts)])

    def layers(self) -> Iterator[tuple[Ints, Ints]]:
        """Each layer of nodes with its leaving edges; nodes on or behind a cycle never come."""
        edges, first = self._leaving
        waits_for = np.bincount(self.after, minlength=self.size)
        place = np.empty(self.size, dtype=np.int64)  # a node's number among all freed with it
        layer = np.flatnonzero(waits_for == 0)
        while len(layer):
            leaving = edges[_ranges(first[layer], first[layer + 1])]
            yield layer, leaving
            reached = self.after[leaving]
            np.subtract.at(waits_for, reached, 1)
            free = reached[waits_for[reached] == 0]
            place[free] = places = np.arange(len(free))
            layer = free[place[free] == places]  # each once

    def reach(self) -> Mask:
        """Mask the nodes in some layer: all, without a cycle."""
        observed = np.zeros(self.size, dtype=bool)
        for layer, _ in self.layers():
            observed[layer] = True
        return observed

    def starts(self, durations: Floats, delays: Floats) -> tuple[Floats, Mask]:
        """The earliest start of every node, and the nodes that can start at all.

        A node takes ``durations[node]``, and ``delays[edge]`` passes between the two ends of an edge.
        """
        starts = np.zeros(self.size)
        observed = np.zeros(self.size, dtype=bool)
        for layer, leaving in self.layers():
            observed[layer] = True
            source = self.before[leaving]
            np.maximum.at(starts, self.after[leaving], starts[source] + durations[source] + delays[leaving])
        return starts, observed

    def critical_path(self, starts: Floats, durations: Floats, delays: Floats) -> list[int]:
        """Nodes without slack in between, up to the last to end, for ``starts`` from above."""
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
        """A cycle with fewest nodes ``within`` a mask, from its smallest node on; [] without one.

        A breadth-first search from every such node, each cut off at the best length so far. After ``_MOST_STEPS``
        steps, some seconds, it returns the best found until then.
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
    """Concatenate first[0]..last[0]-1, first[1]..last[1]-1 and so on."""
    counts = last - first
    ends: Ints = counts.cumsum()
    each: Ints = (first - ends + counts).repeat(counts)
    return each + np.arange(ends[-1])


def _on_cycles(following: Mapping[int, list[int]]) -> list[int]:
    """Nodes with an endless way on: the rest after repeated removal of dead ends."""
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
    """The shortest cycle through ``start`` with fewer than ``shorter_than`` nodes (0: no bound), else [].

    With it, the number of visited nodes.
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
