"""Detect a module's own losses: backwards that reach its weights or inputs around its outputs.

Most modules' gradients follow from their outputs' gradients. A module with an auxiliary loss in an attribute, or with
penalised weights, has others besides, which outputs cannot reveal. Other losses arise outside: gradients that no module
returned.

Each backward starts at roots. Its graph is walked down to the outputs of watched calls: usually a node or two. Very
deep parts stay unsearched. Calls' inputs and outputs are noted in the graph nodes' ``metadata``, which lives as long as
the nodes and keeps nothing alive.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeproof.core.observe.fence import Fence
from pipeproof.core.observe.per_rank_globals import belongs_to_rank
from pipeproof.core.observe.shards import InShards
from pipeproof.core.observe.stack import Stack, own_stack
from pipeproof.reference.graph import FAR, Edge, Node, down, is_inside_a_backward

_ENGINE = "_execution_engine"  # attribute on ``Variable``: the entry for all Python backwards
_SAID = "tensors", "grad_tensors", "keep_graph", "create_graph", "inputs", "allow_unreachable", "accumulate_grad"
_WRITES = "CopySlices"  # type of the node behind the base of a view that was written to
_NOTED = "pipeproof: what calls gave and were given"
_HALF = "pipeproof: a backward that was not for all came through here"

_CALL = nn.Module.__call__.__code__

_Ends = Collection[Tensor | GradientEdge]
_numbers = count()


@dataclass(frozen=True)
class OwnLoss:
    """The first such backward's call.

    weights: it reached module weights, otherwise inputs. apart: one bypassed the outputs. given: one reached inputs.
    named: reached weights, if whole.
    """

    weights: bool
    apart: bool
    stack: Stack
    given: bool = False
    named: frozenset[str] = frozenset()

    def is_of(self, weights: Collection[str]) -> bool:
        """True if a loss on outputs and ``weights`` covers this one."""
        return bool(self.weights and weights and not self.given and self.named <= {*weights})


@dataclass(frozen=True)
class _Noted:
    """Modules around one node's results, by result number: ``gave`` as output, ``given`` as input.

    weight_of: modules that own a gathered weight. viewed: results whose views a call returned.
    """

    gave: dict[int, set[int]] = field(default_factory=dict)
    given: dict[int, set[int]] = field(default_factory=dict)
    weight_of: set[int] = field(default_factory=set)
    viewed: set[int] = field(default_factory=set)


class OwnLosses:
    """Finds watched modules' own losses, until closed. ``flowed``: counts backwards through a module's outputs."""

    def __init__(self, flowed: Callable[[nn.Module], int]) -> None:
        self.fence = Fence()
        self._flowed = flowed
        self._modules: dict[int, nn.Module] = {}  # by unique number
        self.own: dict[nn.Module, OwnLoss] = {}  # first own losses
        self.outside: dict[nn.Module, Stack] = {}  # first lines where an outside loss started a backward to outputs

    def watch(self, module: nn.Module) -> None:
        """Watch ``module`` from now on."""
        global _open, _engine
        self._modules[next(_numbers)] = module
        if _engine is None:
            _engine = _Engine(vars(Variable)[_ENGINE])
            setattr(Variable, _ENGINE, _engine)
        _open = (*(one for one in _open if one is not self), self)

    def note_call(self, module: nn.Module, inputs: Iterable[Tensor], outputs: Iterable[Tensor]) -> None:
        """Note a call, with all tensors that require a gradient."""
        if not _open:
            return
        own = {number for number, one in self._modules.items() if one is module}
        every = [*outputs]
        given, gave = {*_edges(inputs)}, {*_edges(every)}
        for node, number in _edges(one._base for one in every if one._is_view() and one._base is not None):
            _note(node).viewed.add(number)
        for node, number in gave:
            _note(node).gave.setdefault(number, set()).update(own)
        for node, number in given:
            _note(node).given.setdefault(number, set()).update(own)
        if any(isinstance(one, InShards) for one in module.parameters()):  # it computes with gathered weights
            for node in _leaves(down(gave - given, lambda *edge: edge in given, FAR)[0]):
                _note(node).weight_of.update(own)

    def anew(self) -> None:
        """Start another operation."""
        self.own.clear()
        self.outside.clear()

    def close(self) -> None:
        """Stop watching backwards."""
        global _open, _engine
        _open = tuple(one for one in _open if one is not self)
        if _open or _engine is None:
            return
        _engine.looks = False
        if vars(Variable)[_ENGINE] is _engine:
            setattr(Variable, _ENGINE, _engine.inner)
        _engine = None

    def begins(self, way: "_Way") -> Callable[[Stack, bool], None]:
        """Start a backward along ``way``, and return a function for its end: line, and whether gradients were added.

        A backward within a call, without added gradients, belongs to the call and repeats with it.
        """
        reached = [one.variable for one in way.leaves]
        ids = {*map(id, reached)}
        gathered = {number for one in way.leaves if _NOTED in _saved_by(one) for number in _note(one).weight_of}
        every = self._modules.items()  # sharded parameters change before the end
        punished = {n for n, one in every if n in gathered or any(id(own) in ids for own in one.parameters())}
        before = {number: self._flowed(one) for number, one in every}

        def over(stack: Stack, adds: bool) -> None:
            for number, flowed in before.items():
                module, weights, given = self._modules[number], number in punished, number in way.given
                if number in way.outside:
                    self.outside.setdefault(module, stack)
                if (weights or given) and (adds or not _is_called_now(module)):
                    apart, named = self._flowed(module) <= flowed, frozenset(weights_among(reached, module))
                    first = self.own.get(module, OwnLoss(weights, apart, stack, given, named))
                    apart, given, named = first.apart or apart, first.given or given, first.named | named
                    self.own[module] = replace(first, apart=apart, given=given, named=named)

        return over


def _is_called_now(module: nn.Module) -> bool:
    """True if a ``module`` call led to this thread's frame. A call that raised has ended without notice."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL and frame.f_locals.get("self") is module:
            return True
        frame = frame.f_back
    return False


def leaves_of(loss: Tensor, outputs: Iterable[Tensor]) -> list[Tensor]:
    """Return the leaves that a ``loss``'s backward reaches around ``outputs``."""
    ends = {*_edges(outputs)}
    passed, _ = down(_edges([loss]), lambda *edge: edge in ends, FAR)
    return [node.variable for node in _leaves(passed)]


def weights_among(leaves: Iterable[Tensor], module: nn.Module) -> set[str]:
    """Return names of ``module`` weights among ``leaves``."""
    own = {*map(id, leaves)}
    return {name for name, one in module.named_parameters() if id(one) in own}


def trains(module: nn.Module) -> bool:
    """True if the current backward reaches ``module`` weights; it may serve other gradients alone.

    Sharded weights are excluded: their module computes with gathered ones.
    """
    own = (one for one in module.parameters() if one.requires_grad and not isinstance(one, InShards))
    try:
        return any(torch._C._will_engine_execute_node(node) for node, _ in _edges(own))
    except RuntimeError:
        return True  # torch refuses an answer only for leaves that this backward was asked for


class _Engine(torch._C._ImperativeEngine):
    """Torch's engine, or a replacement, with observers around its backwards.

    A later replacement may still call this one after observation ends.
    """

    def __init__(self, inner: Any) -> None:
        self.inner, self.looks = inner, True

    def run_backward(self, *given: Any, **named: Any) -> Any:
        """Run a backward. A nested one may repeat part of the graph: its inputs belong to no call."""
        begin = self.inner.run_backward
        if not self.looks or not _open:
            return begin(*given, **named)
        said = dict(zip(_SAID, given, strict=False)) | named
        # Errors before the backward's owner is known concern all.
        begins = _open[0].fence.around(self._begins)(said, inside=is_inside_a_backward())
        for one in _open[1:]:
            one.fence.broken = one.fence.broken or _open[0].fence.broken
        half, over = begins or (False, ())
        global _halves
        _halves += half
        try:
            result = begin(*given, **named)
        finally:
            _halves -= half
        for tell in over:
            tell(own_stack(), bool(said.get("accumulate_grad")))
        return result

    def _begins(
        self, said: Mapping[str, Any], *, inside: bool
    ) -> tuple[bool, Sequence[Callable[[Stack, bool], object]]]:
        """Return whether a backward continues a partial one, and functions to call at its end."""
        if inside and not said.get("accumulate_grad"):
            return False, ()
        begun = [edge for edge in _edges(said["tensors"]) if _HALF not in _saved_by(edge[0])]
        if not begun:
            return not inside, ()
        way = _Way.of(begun, said["tensors"], said.get("inputs", ()))
        way = replace(way, leaves=()) if inside else way
        if not (way.leaves or way.given or way.outside):
            return False, ()
        over = [(one, one.fence.around(one.begins)(way)) for one in _open]
        return False, [one.fence.around(tell) for one, tell in over if tell is not None]

    @staticmethod
    def below(engine: Any) -> Any:
        """Unwrap ``engine``."""
        while isinstance(engine, _Engine):
            engine = engine.inner
        return engine


_halves = 0  # running backwards that continue another's
belongs_to_rank(__name__, "_halves", fresh=lambda _: 0)


def goes_on() -> bool:
    """True during a backward that continues a partial one."""
    return _halves > 0


_open: tuple[OwnLosses, ...] = ()
_engine: _Engine | None = None  # present while any observer is open
belongs_to_rank(__name__, "_open", fresh=lambda _: ())
belongs_to_rank(__name__, "_engine", fresh=lambda _: None)
belongs_to_rank(Variable, _ENGINE, fresh=_Engine.below)


@dataclass(frozen=True)
class _Way:
    """A backward's targets: ``leaves`` around call outputs, and modules whose inputs (``given``) it reaches.

    outside: modules whose outputs a loss reaches.
    """

    leaves: Sequence[Node] = ()
    given: Collection[int] = ()
    outside: Collection[int] = ()

    @staticmethod
    def of(begun: Sequence[Edge], roots: _Ends, ends: _Ends) -> "_Way":
        """Trace a backward from ``begun`` edges, called at ``roots``.

        With ``ends`` it serves those alone; the remainder may start anywhere along it.
        """
        passed, gave = down(begun, _is_given, FAR)
        # Edges below writes into views that calls returned.
        below = (edge for node, _ in passed if type(node).__name__ == _WRITES for edge in node.next_functions[:1])
        if written := {(n, k) for n, k in below if _NOTED in _saved_by(n) and k in _note(n).viewed}:
            passed, gave = down(begun, lambda *edge: edge in written or _is_given(*edge), FAR)
        single = (root for root in roots if isinstance(root, Tensor) and root.numel() == 1)  # possible losses
        losses = [edge for edge in _edges(single) if not _is_given(*edge)]
        _, summed = down(losses, _is_given, FAR) if losses != [*begun] else ((), gave)
        if ends:
            for node, _ in down(gave, lambda node, _: _HALF in _saved_by(node), FAR)[0]:
                _saved_by(node)[_HALF] = True
            passed &= {*_edges(ends)}
        noted = (_note(node).given.get(number, ()) for node, number in passed if _NOTED in _saved_by(node))
        outside = (_note(node).gave.get(number, ()) for node, number in summed if _NOTED in _saved_by(node))
        return _Way(_leaves(passed), set().union(*noted), set().union(*outside))


def _is_given(node: Node, number: int) -> bool:
    return _NOTED in _saved_by(node) and number in _note(node).gave


def _leaves(edges: Iterable[Edge]) -> list[Node]:
    return [node for node, _ in edges if hasattr(node, "variable")]


def _edges(tensors: Iterable[Tensor | GradientEdge]) -> Iterator[Edge]:
    for one in tensors:
        if isinstance(one, GradientEdge):
            yield one.node, one.output_nr
        elif one.grad_fn is not None:
            yield one.grad_fn, one.output_nr
        elif one.requires_grad and not torch._C._functorch.is_functorch_wrapped_tensor(one):
            with torch.inference_mode(False):  # torch would use a view, which inference mode lacks
                yield get_gradient_edge(one).node, 0


def _saved_by(node: Node) -> dict[str, Any]:
    kept: dict[str, Any] = node.metadata
    return kept


def _note(node: Node) -> _Noted:
    found: _Noted = _saved_by(node).setdefault(_NOTED, _Noted())
    return found
