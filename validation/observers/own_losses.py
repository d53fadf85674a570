"""Losses of a module's own: backwards that come to its weights, or to what it was given, past what it gave.

The gradients of most modules are those of what flowed back to their outputs. One that keeps an auxiliary loss in an
attribute, or whose weights the loss punishes, has others besides, and nobody can tell these by its outputs.

Every backward begins at roots. From there its graph is walked down, no further than to what watched calls gave: in a
usual step that is a node or two. What calls gave and were given is noted in the ``metadata`` of the graph's nodes,
which lives as long as they do and keeps nothing alive.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeproof.observers.backward_lines import is_inside_a_backward
from pipeproof.observers.shards import InShards
from pipeproof.reference.graph import Edge, Node, down
from pipeproof.worlds.belongings import belongs_to_rank
from pipeproof.worlds.stack import Stack, own_stack

_ENGINE = "_engine_run_backward"  # torch begins every backward with it that is called for in Python
_NOTED = "pipeproof: what calls gave and were given"
_HALF = "pipeproof: a backward that was not for all came through here"

_Ends = Collection[Tensor | GradientEdge]
_numbers = count()


@dataclass(frozen=True)
class OwnLoss:
    """Where the first such backward was called for.

    ``weights``: it came to the module's, else to what it was given. ``apart``: one came not through what it gave.
    """

    weights: bool
    apart: bool
    stack: Stack


@dataclass(frozen=True)
class _Noted:
    """Of the results of one node: those that a call gave, and by number the modules that each was given to.

    ``weight_of``: of a node that is a weight as it was gathered, the modules that it is one of.
    """

    gave: set[int] = field(default_factory=set)
    given: dict[int, set[int]] = field(default_factory=dict)
    weight_of: set[int] = field(default_factory=set)


class OwnLosses:
    """Those of watched modules, until it is closed. ``flowed``: how many backwards came through what a module gave."""

    def __init__(self, flowed: Callable[[nn.Module], int]) -> None:
        self._flowed = flowed
        self._modules: dict[int, nn.Module] = {}  # by a number that no other has
        self._found: dict[nn.Module, OwnLoss] = {}

    def of(self, module: nn.Module) -> OwnLoss | None:
        """The first of ``module``, if it has any."""
        return self._found.get(module)

    def watch(self, module: nn.Module) -> None:
        """Look at ``module`` from now on."""
        self._modules[next(_numbers)] = module
        _listen(self)

    def called(self, module: nn.Module, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
        """``module`` was called, whether or not it is looked at; all of these want a gradient."""
        if not _open:
            return
        own = {number for number, one in self._modules.items() if one is module}
        given, gave = {*_edges(inputs)}, {*_edges(outputs)}
        for node, number in gave:
            _noted(node).gave.add(number)
        for node, number in given:
            _noted(node).given.setdefault(number, set()).update(own)
        if any(isinstance(one, InShards) for one in module.parameters()):  # it computes with others, gathered for this
            for node in _leaves(down(gave - given, lambda *edge: edge in given)[0]):
                _noted(node).weight_of.update(own)

    def anew(self) -> None:
        """Another operation begins."""
        self._found.clear()

    def close(self) -> None:
        """Look at no more backwards."""
        _forget(self)

    def begins(self, leaves: Collection[Node], given: Collection[int]) -> Callable[[Stack], None]:
        """A backward begins that comes to ``leaves``, and to what modules of these numbers were ``given``, past what
        calls gave; once it is over, tell where it was called for.

        What was given is of no matter to a module through which it does not come: its own backward is another one.
        """
        reached = {id(one.variable) for one in leaves}
        gathered = {number for one in leaves if _NOTED in _kept_by(one) for number in _noted(one).weight_of}
        every = self._modules.items()  # in shards, a module's parameters are others once it is over
        punished = {n for n, one in every if n in gathered or any(id(own) in reached for own in one.parameters())}
        before = {number: self._flowed(one) for number, one in every}

        def over(stack: Stack) -> None:
            for number, flowed in before.items():
                module, weights = self._modules[number], number in punished
                through = self._flowed(module) > flowed
                if weights or (through and number in given):
                    known = self._found.setdefault(module, OwnLoss(weights, not through, stack))
                    self._found[module] = replace(known, apart=known.apart or not through)

        return over


def comes_to_weights(loss: Tensor, outputs: Iterable[Tensor], weights: Iterable[Tensor]) -> bool:
    """Whether the backward of a ``loss`` of ``outputs`` comes to any of the ``weights`` past these."""
    ends = {*_edges(outputs)}
    passed, _ = down(_edges([loss]), lambda *edge: edge in ends)
    reached = {id(node.variable) for node in _leaves(passed)}
    return any(id(one) in reached for one in weights)


_open: tuple[OwnLosses, ...] = ()
_engine: Any = None  # torch's own, while any is open
belongs_to_rank(__name__, "_open", fresh=lambda _: ())
belongs_to_rank(__name__, "_engine", fresh=lambda _: None)
belongs_to_rank(torch.autograd, _ENGINE, fresh=lambda engine: engine)


def _listen(losses: OwnLosses) -> None:
    global _open, _engine
    if not _open:
        _engine = vars(torch.autograd)[_ENGINE]
        setattr(torch.autograd, _ENGINE, _begins)
    _open = (*(one for one in _open if one is not losses), losses)


def _forget(losses: OwnLosses) -> None:
    global _open
    was, _open = _open, tuple(one for one in _open if one is not losses)
    if was and not _open and vars(torch.autograd)[_ENGINE] is _begins:
        setattr(torch.autograd, _ENGINE, _engine)


def _begins(roots: _Ends, gradients: Any, keeps: bool, creates: bool, ends: _Ends, *more: Any, **named: Any) -> Any:
    """Torch's own, which somebody watches. One inside another runs a part of the graph again: the outer one counts."""
    begin = partial(_engine, roots, gradients, keeps, creates, ends, *more, **named)
    if not _open or is_inside_a_backward():
        return begin()
    leaves, numbers = _past(roots, ends)
    if not leaves and not numbers:
        return begin()
    told = [one.begins(leaves, numbers) for one in _open]
    result = begin()
    for tell in told:
        tell(own_stack())
    return result


def _past(roots: _Ends, ends: _Ends) -> tuple[list[Node], set[int]]:
    """What a backward from ``roots`` comes to past what calls gave: leaves, and the numbers of modules that were given
    it. Where there are ``ends`` it is for them alone, and what is left of it may begin anywhere on its way."""
    begun = [edge for edge in _edges(roots) if _HALF not in _kept_by(edge[0])]
    passed, gave = down(begun, lambda node, number: _NOTED in _kept_by(node) and number in _noted(node).gave)
    if ends:
        for node, _ in down(gave, lambda node, _: _HALF in _kept_by(node))[0]:
            _kept_by(node)[_HALF] = True
        passed &= {*_edges(ends)}
    noted = (_noted(node).given.get(number, ()) for node, number in passed if _NOTED in _kept_by(node))
    return _leaves(passed), set().union(*noted)


def _leaves(edges: Iterable[Edge]) -> list[Node]:
    return [node for node, _ in edges if hasattr(node, "variable")]


def _edges(tensors: Iterable[Tensor | GradientEdge]) -> Iterator[Edge]:
    for one in tensors:
        if isinstance(one, GradientEdge):
            yield one.node, one.output_nr
        elif one.requires_grad:
            edge = get_gradient_edge(one)
            yield edge.node, edge.output_nr


def _kept_by(node: Node) -> dict[str, Any]:
    kept: dict[str, Any] = node.metadata
    return kept


def _noted(node: Node) -> _Noted:
    found: _Noted = _kept_by(node).setdefault(_NOTED, _Noted())
    return found
