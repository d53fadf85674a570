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
from dataclasses import dataclass, replace
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
from pipeproof.reference.graph import FAR, Edge, Node, down, is_inside_a_backward, leaves_behind

_ENGINE = "_execution_engine"  # attribute on ``Variable``: the entry for all Python backwards
_SAID = "tensors", "grad_tensors", "keep_graph", "create_graph", "inputs", "allow_unreachable", "accumulate_grad"
_WRITES = "CopySlices"  # type of the node behind the base of a view that was written to
_HALF = "pipeproof: a backward that was not for all came through here"

# Notes at a node, each with a result's number: the modules that gave this result, were given it, computed with it as a
# gathered weight, or gave a view of it.
_GAVE, _GIVEN, _WEIGHT, _VIEWED = (f"pipeproof: {note}" for note in ("gave", "given", "weight", "viewed"))

_CALL = nn.Module.__call__.__code__

_Ends = Collection[Tensor | GradientEdge]
_Tell = Callable[[Stack, bool], object]  # for a backward's end: its line, and whether it added gradients
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
class _Way:
    """A backward's targets around call outputs: ``leaves``, and modules ``given`` as inputs or ``gathered`` as weights.

    outside: modules whose outputs a loss reaches.
    """

    leaves: Sequence[Tensor] = ()
    gathered: Collection[int] = ()
    given: Collection[int] = ()
    outside: Collection[int] = ()


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
        given, gave, weights = {*_edges(inputs)}, {*_edges(every)}, list[Edge]()
        viewed = _edges(one._base for one in every if one._is_view() and one._base is not None)
        if any(isinstance(one, InShards) for one in module.parameters()):  # it computes with gathered weights
            weights = _leaves(down(gave - given, lambda *edge: edge in given, FAR)[0])
        for note, edges in ((_GAVE, gave), (_GIVEN, given), (_VIEWED, viewed), (_WEIGHT, weights)):
            for node, number in edges:
                node.metadata.setdefault((note, number), set()).update(own)

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
        if vars(Variable)[_ENGINE] is _engine:
            setattr(Variable, _ENGINE, _engine.inner)
        _engine = None

    def begins(self, way: _Way) -> _Tell:
        """Start a backward along ``way``, and return a function for its end.

        A backward within a call, without added gradients, belongs to the call and repeats with it.
        """
        ids = {*map(id, way.leaves)}
        every = dict(self._modules)
        # Sharded parameters change before the end.
        punished = {n for n, one in every.items() if any(id(own) in ids for own in one.parameters())} | {*way.gathered}
        before = {number: self._flowed(one) for number, one in every.items()}

        def over(stack: Stack, adds: bool) -> None:
            for number, module in every.items():
                weights, given = number in punished, number in way.given
                if number in way.outside:
                    self.outside.setdefault(module, stack)
                if (weights or given) and (adds or not _is_called_now(module)):
                    first = self.own.get(module, OwnLoss(weights, False, stack))
                    self.own[module] = replace(
                        first,
                        apart=first.apart or self._flowed(module) <= before[number],
                        given=first.given or given,
                        named=first.named | weights_among(way.leaves, module),
                    )

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
    return leaves_behind(_edges([loss]), {*_edges(outputs)})


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
        self.inner = inner

    def run_backward(self, *given: Any, **named: Any) -> Any:
        """Run a backward. A nested one may repeat part of the graph: its inputs belong to no call."""
        if self is not _engine:
            return self.inner.run_backward(*given, **named)
        said = dict(zip(_SAID, given, strict=False)) | named
        # Errors before the backward's owner is known concern all.
        half, over = _open[0].fence.around(_begin)(said) or (False, ())
        for one in _open[1:]:
            one.fence.broken = one.fence.broken or _open[0].fence.broken
        global _halves
        _halves += half
        try:
            result = self.inner.run_backward(*given, **named)
        finally:
            _halves -= half
        for tell in over:
            tell(own_stack(), bool(said.get("accumulate_grad")))
        return result

    @staticmethod
    def below(engine: Any) -> Any:
        """Unwrap ``engine``."""
        while isinstance(engine, _Engine):
            engine = engine.inner
        return engine


def _begin(said: Mapping[str, Any]) -> tuple[bool, Sequence[_Tell]]:
    """Return whether a backward continues a partial one, and functions to call at its end."""
    inside = is_inside_a_backward()
    if inside and not said.get("accumulate_grad"):
        return False, ()
    begun = [edge for edge in _edges(said["tensors"]) if _HALF not in edge[0].metadata]
    if not begun:
        return not inside, ()
    way = _trace(begun, said["tensors"], said.get("inputs", ()))
    way = replace(way, leaves=(), gathered=()) if inside else way
    if not (way.leaves or way.given or way.outside):
        return False, ()
    over = [(one.fence, one.fence.around(one.begins)(way)) for one in _open]
    return False, [fence.around(tell) for fence, tell in over if tell is not None]


def _trace(begun: Sequence[Edge], roots: _Ends, ends: _Ends) -> _Way:
    """Trace a backward from ``begun`` edges, called at ``roots``.

    With ``ends`` it serves those alone; the remainder may start anywhere along it.
    """
    passed, gave = down(begun, _is_given, FAR)
    # Edges below writes into views that calls returned.
    below = (edge for node, _ in passed if type(node).__name__ == _WRITES for edge in node.next_functions[:1])
    if written := {(node, number) for node, number in below if (_VIEWED, number) in node.metadata}:
        passed, gave = down(begun, lambda *edge: edge in written or _is_given(*edge), FAR)
    single = (root for root in roots if isinstance(root, Tensor) and root.numel() == 1)  # possible losses
    losses = [edge for edge in _edges(single) if not _is_given(*edge)]
    _, summed = down(losses, _is_given, FAR) if losses != [*begun] else ((), gave)
    if ends:
        for node, _ in down(gave, lambda node, _: _HALF in node.metadata, FAR)[0]:
            node.metadata[_HALF] = True
        passed &= {*_edges(ends)}
    leaves = [node.variable for node, _ in _leaves(passed)]
    return _Way(leaves, _noted(_WEIGHT, passed), _noted(_GIVEN, passed), _noted(_GAVE, summed))


def _is_given(node: Node, number: int) -> bool:
    return (_GAVE, number) in node.metadata


def _noted(note: str, edges: Iterable[Edge]) -> set[int]:
    """Modules with this note at any of ``edges``."""
    return set().union(*(node.metadata.get((note, number), ()) for node, number in edges))


def _leaves(edges: Iterable[Edge]) -> list[Edge]:
    return [edge for edge in edges if hasattr(edge[0], "variable")]


def _edges(tensors: Iterable[Tensor | GradientEdge]) -> Iterator[Edge]:
    for one in tensors:
        if isinstance(one, GradientEdge):
            yield one.node, one.output_nr
        elif one.grad_fn is not None:
            yield one.grad_fn, one.output_nr
        elif one.requires_grad and not torch._C._functorch.is_functorch_wrapped_tensor(one):
            with torch.inference_mode(False):  # torch would use a view, which inference mode lacks
                yield get_gradient_edge(one).node, 0


_halves = 0  # running backwards that continue another's
_open: tuple[OwnLosses, ...] = ()
_engine: _Engine | None = None  # present while any observer is open
belongs_to_rank(__name__, "_halves", fresh=lambda _: 0)
belongs_to_rank(__name__, "_open", fresh=lambda _: ())
belongs_to_rank(__name__, "_engine", fresh=lambda _: None)
belongs_to_rank(Variable, _ENGINE, fresh=_Engine.below)


def goes_on() -> bool:
    """True during a backward that continues a partial one."""
    return _halves > 0
