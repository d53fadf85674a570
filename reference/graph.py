"""Autograd's graph after a forward: parameters behind a tensor, their counts, and stage ends."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

Node = Any  # torch.autograd.graph.Node, which is one object as long as somebody holds it
Edge = tuple[Node, int]  # a node, and the number of its output

FAR = 20_000  # edges: torch 2.13 ends the process as it frees a graph of which Python has observed 50,000 in a row
NONE = -1  # the depth of nodes without a parameter
_MIXED = frozenset({-1, -2})  # several parameters: which they are is no matter


def is_inside_a_backward() -> bool:
    """True if a backward runs in this thread. It may recompute a forward."""
    return torch._C._current_graph_task_id() != -1


def ends_of(tensors: Iterable[Tensor]) -> list[Edge]:
    """Edges at ``tensors`` in the graph."""
    return [(tensor.grad_fn, tensor.output_nr) for tensor in tensors if tensor.grad_fn is not None]


def down(
    edges: Iterable[Edge], ends: Callable[[Node, int], bool], most: float = math.inf
) -> tuple[set[Edge], set[Edge]]:
    """Walk edges back in time, up to edges at which it ``ends``; return both sets.

    After ``most`` edges it stops.
    """
    passed, over, todo = set[Edge](), set[Edge](), [*edges]
    while todo and len(passed) < most:
        edge = todo.pop()
        if edge not in passed and edge not in over:
            (over if ends(*edge) else passed).add(edge)
            todo += _before(edge[0]) if edge in passed else ()
    return passed, over


def leaves_behind(edges: Iterable[Edge], ends: Collection[Edge] = ()) -> list[Tensor]:
    """Leaves that a backward from ``edges`` reaches without passing ``ends``. Very deep ones are not looked for."""
    passed, _ = down(edges, lambda *edge: edge in ends, FAR)
    return list({id(node): node.variable for node, _ in passed if hasattr(node, "variable")}.values())


def types_between(before: Iterable[Tensor], tensors: Iterable[Tensor]) -> set[torch.dtype]:
    """Types of values computed from tensors ``before`` to ``tensors``, along gradients."""
    known = {node for node, _ in ends_of(before)}
    passed, _ = down(ends_of(tensors), lambda node, _: node in known or hasattr(node, "variable"))
    return {one.dtype for node, _ in passed for one in getattr(node, "_input_metadata", ())}  # of its outputs


def depths(ends: Iterable[Edge], stage_of: Mapping[int, int]) -> dict[Node, int]:
    """For every node behind ``ends``, the last stage with a parameter in it, or ``NONE``.

    ``stage_of``: the stage of every parameter by its tensor's id.
    """
    found: dict[Node, int] = {}
    for node in _upwards(ends):
        below = [found[before] for before, _ in _before(node)]
        found[node] = max([stage_of.get(id(getattr(node, "variable", None)), NONE), *below])
    return found


def uses(ends: Iterable[Edge]) -> Counter[int]:
    """How often each parameter meets other tensors, unchanged or alone in a computation, by its tensor's id."""
    sources: dict[Node, frozenset[int]] = {}
    count: Counter[int] = Counter()
    for node in _upwards(ends):
        own = {id(node.variable)} if hasattr(node, "variable") else set()
        every = own.union(*(sources[before] for before, _ in _before(node)))
        sources[node] = frozenset(every) if len(every) < 2 else _MIXED
        if sources[node] is _MIXED:
            count.update(next(iter(sources[b])) for b, _ in _before(node) if sources[b] and sources[b] is not _MIXED)
    return count


def consumers(ends: Iterable[Edge], leaves: Collection[int]) -> dict[int, list[tuple[Node, int]]]:
    """By tensor id: the nodes with each of ``leaves`` as input, and the input's number.

    In forward order. A transposed weight used twice has one.
    """
    found: dict[int, list[tuple[Node, int]]] = {}
    for node in sorted(_upwards(ends), key=lambda one: one._sequence_nr()):
        for number, (before, _) in enumerate(node.next_functions):
            if (leaf := id(getattr(before, "variable", None))) in leaves:
                found.setdefault(leaf, []).append((node, number))
    return found


def frontier(ends: Iterable[Edge], deep: Mapping[Node, int], stage: int, known: Collection[Edge]) -> set[Edge] | None:
    """The last ``known`` edges without a parameter after ``stage``, seen from ``ends``.

    None if a parameter of ``stage`` or before is reached past all of them.
    """

    def is_over(node: Node, number: int) -> bool:
        return deep[node] == NONE or (deep[node] <= stage and (node, number) in known)

    passed, over = down(ends, is_over)
    if any(deep[node] <= stage and hasattr(node, "variable") for node, _ in passed):
        return None
    return {edge for edge in over if deep[edge[0]] != NONE}


def _upwards(ends: Iterable[Edge]) -> Iterator[Node]:
    """Every node behind ``ends`` once, each after its predecessors."""
    visited: set[Node] = set()
    waiting = [node for node, _ in ends]
    while waiting:
        node = waiting[-1]
        open_ = [before for before, _ in _before(node) if before not in visited]
        if node in visited or not open_:
            waiting.pop()
            if node not in visited:
                visited.add(node)
                yield node
        waiting += open_


def _before(node: Node) -> Iterator[Edge]:
    return ((before, number) for before, number in node.next_functions if before is not None)


def hook_at(tensor: Tensor, hook: Callable[[Tensor], Any]) -> RemovableHandle:
    """Register ``hook`` at ``tensor``."""
    _ = tensor.grad_fn  # without it torch ends the process at a view whose base was written to through another view
    handle: RemovableHandle = tensor.register_hook(hook)  # type: ignore[no-untyped-call]  # in torch
    return handle


def hook_first(tensor: Tensor, hook: Callable[[Tensor], Any]) -> None:
    """Register ``hook`` at ``tensor``, before earlier hooks, like a module's on its output."""
    handle = hook_at(tensor, hook)
    hooks: dict[int, Any] | None = tensor._backward_hooks
    if hooks is not None and handle.id in hooks:
        own, others = hooks.pop(handle.id), {**hooks}
        hooks.clear()  # torch calls them in the order in which they were put in
        hooks.update({handle.id: own, **others})
