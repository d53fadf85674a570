"""Losses of a module's own: backwards that come to its weights, or to what it was given, past what it gave.

The gradients of most modules are those of what flowed back to their outputs. One that keeps an auxiliary loss in an
attribute, or whose weights the loss punishes, has others besides, and nobody can tell these by its outputs. Other
losses are made outside of what a module gave: what they bring there, no other module handed back.

Every backward begins at roots. From there its graph is walked down, no further than to what watched calls gave: in a
usual step that is a node or two. What is very far down is not looked for. What calls gave and were given is noted in
the ``metadata`` of the graph's nodes, which lives as long as they do and keeps nothing alive.
"""

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import count
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pipeproof.core.observe.backward_lines import is_inside_a_backward
from pipeproof.core.observe.belongings import belongs_to_rank
from pipeproof.core.observe.fence import Fence
from pipeproof.core.observe.shards import InShards
from pipeproof.core.observe.stack import Stack, own_stack
from pipeproof.core.observe.written_views import WRITES
from pipeproof.reference.graph import FAR, Edge, Node, down

_ENGINE = "_execution_engine"  # of ``Variable``: every backward that is called for in Python begins there
_SAID = "tensors", "grad_tensors", "keep_graph", "create_graph", "inputs", "allow_unreachable", "accumulate_grad"
_NOTED = "pipeproof: what calls gave and were given"
_HALF = "pipeproof: a backward that was not for all came through here"

_CALL = nn.Module.__call__.__code__

_Ends = Collection[Tensor | GradientEdge]
_numbers = count()


@dataclass(frozen=True)
class OwnLoss:
    """Where the first such backward was called for.

    ``weights``: it came to the module's, else to what it was given. ``apart``: one came not through what it gave.
    ``given``: one came to what it was given. ``named``: the weights to which any came, where it has them whole.
    """

    weights: bool
    apart: bool
    stack: Stack
    given: bool = False
    named: frozenset[str] = frozenset()

    def is_of(self, weights: Collection[str]) -> bool:
        """Whether a loss of what the module gave, and of these of its ``weights``, comes to no more than it did."""
        return bool(self.weights and weights and not self.given and self.named <= {*weights})

    def and_also(self, later: "OwnLoss") -> "OwnLoss":
        """With a ``later`` one."""
        given, apart = self.given or later.given, self.apart or later.apart
        return replace(self, given=given, apart=apart, named=self.named | later.named)


@dataclass(frozen=True)
class _Noted:
    """Of the results of one node, by number: the modules that gave each in a call, and those that it was given to.

    ``weight_of``: of a node that is a weight as it was gathered, the modules that it is one of. ``viewed``: those of
    which a call gave a view.
    """

    gave: dict[int, set[int]] = field(default_factory=dict)
    given: dict[int, set[int]] = field(default_factory=dict)
    weight_of: set[int] = field(default_factory=set)
    viewed: set[int] = field(default_factory=set)


class OwnLosses:
    """Those of watched modules, until it is closed. ``flowed``: how many backwards came through what a module gave."""

    def __init__(self, flowed: Callable[[nn.Module], int]) -> None:
        self.fence = Fence()
        self._flowed = flowed
        self._modules: dict[int, nn.Module] = {}  # by a number that no other has
        self._found: dict[nn.Module, OwnLoss] = {}
        self._outside: dict[nn.Module, Stack] = {}

    def outside(self, module: nn.Module) -> Stack | None:
        """Where the first backward of a loss was called for that came to what ``module`` gave; None if none did."""
        return self._outside.get(module)

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
        every = [*outputs]
        given, gave = {*_edges(inputs)}, {*_edges(every)}
        for node, number in _edges(one._base for one in every if one._is_view() and one._base is not None):
            _noted(node).viewed.add(number)
        for node, number in gave:
            _noted(node).gave.setdefault(number, set()).update(own)
        for node, number in given:
            _noted(node).given.setdefault(number, set()).update(own)
        if any(isinstance(one, InShards) for one in module.parameters()):  # it computes with others, gathered for this
            for node in _leaves(down(gave - given, lambda *edge: edge in given, FAR)[0]):
                _noted(node).weight_of.update(own)

    def anew(self) -> None:
        """Another operation begins."""
        self._found.clear()
        self._outside.clear()

    def close(self) -> None:
        """Look at no more backwards."""
        _forget(self)

    def begins(self, way: "_Way") -> Callable[[Stack, bool], None]:
        """A backward begins that goes this ``way``; once it is over, tell where it was called for, and whether it adds
        gradients to those of tensors.

        What a call itself asks for, and adds to none, is a part of that call, and is asked for again with it.
        """
        reached = {id(one.variable) for one in way.leaves}
        gathered = {number for one in way.leaves if _NOTED in _kept_by(one) for number in _noted(one).weight_of}
        every = self._modules.items()  # in shards, a module's parameters are others once it is over
        punished = {n for n, one in every if n in gathered or any(id(own) in reached for own in one.parameters())}
        before = {number: self._flowed(one) for number, one in every}

        def over(stack: Stack, adds: bool) -> None:
            for number, flowed in before.items():
                module, weights = self._modules[number], number in punished
                through = self._flowed(module) > flowed
                to_given = number in way.given
                if number in way.outside:
                    self._outside.setdefault(module, stack)
                if (weights or to_given) and (adds or not _is_called_now(module)):
                    found = OwnLoss(weights, not through, stack, to_given, frozenset(_names(module, reached)))
                    self._found[module] = self._found[module].and_also(found) if module in self._found else found

        return over


def _is_called_now(module: nn.Module) -> bool:
    """Whether a call of ``module`` has brought this thread here. A call that raised has ended, and told nobody."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _CALL and frame.f_locals.get("self") is module:
            return True
        frame = frame.f_back
    return False


def leaves_of(loss: Tensor, outputs: Iterable[Tensor]) -> list[Tensor]:
    """The leaves to which the backward of a ``loss`` of ``outputs`` comes past these."""
    ends = {*_edges(outputs)}
    passed, _ = down(_edges([loss]), lambda *edge: edge in ends, FAR)
    return [node.variable for node in _leaves(passed)]


def weights_among(leaves: Iterable[Tensor], module: nn.Module) -> set[str]:
    """The names of the ``module``'s weights that are ``leaves`` of a graph."""
    return _names(module, {*map(id, leaves)})


def trains(module: nn.Module) -> bool:
    """Whether the backward that runs comes to weights of ``module``: one may only be asked for other gradients.

    Not of those in shards: it computes with others.
    """
    own = (one for one in module.parameters() if one.requires_grad and not isinstance(one, InShards))
    return any(map(_comes_to, own))


def _comes_to(weight: Tensor) -> bool:
    try:
        return any(torch._C._will_engine_execute_node(node) for node, _ in _edges([weight]))
    except RuntimeError:
        return True  # torch only says of leaves that this backward is asked for that it does not say


def _names(module: nn.Module, weights: Collection[int]) -> set[str]:
    return {name for name, one in module.named_parameters() if id(one) in weights}


class _Engine(torch._C._ImperativeEngine):
    """Torch's own, or what somebody put there, and who looks at its backwards.

    Whoever took its place meanwhile still calls it when nobody looks any more.
    """

    def __init__(self, inner: Any) -> None:
        self.inner, self.looks = inner, True

    def run_backward(self, *given: Any, **named: Any) -> Any:
        """Torch's. One inside another may run a part of the graph again: then what it comes to was given to no call."""
        begin = self.inner.run_backward
        if not self.looks or not _open:
            return begin(*given, **named)
        said = dict(zip(_SAID, given, strict=False)) | named
        # What goes wrong before it is known whose backward it is concerns all.
        begins = _open[0].fence.around(self._begins)(said, inside=is_inside_a_backward())
        for one in _open[1:]:
            one.fence.broken = one.fence.broken or _open[0].fence.broken
        around, over = begins or (nullcontext(), ())
        with around:
            result = begin(*given, **named)
        for tell in over:
            tell(own_stack(), bool(said.get("accumulate_grad")))
        return result

    def _begins(
        self, said: Mapping[str, Any], *, inside: bool
    ) -> tuple[AbstractContextManager[None], Sequence[Callable[[Stack, bool], object]]]:
        """In what context a backward that is ``said`` so is to run, and whom to tell that it is over."""
        if inside and not said.get("accumulate_grad"):
            return nullcontext(), ()
        begun = [edge for edge in _edges(said["tensors"]) if _HALF not in _kept_by(edge[0])]
        if not begun:
            return nullcontext() if inside else _going_on(), ()
        way = _Way.of(begun, said["tensors"], said.get("inputs", ()))
        way = replace(way, leaves=()) if inside else way
        if not way.comes_anywhere:
            return nullcontext(), ()
        over = [(one, one.fence.around(one.begins)(way)) for one in _open]
        return nullcontext(), [one.fence.around(tell) for one, tell in over if tell is not None]

    @staticmethod
    def below(engine: Any) -> Any:
        """What is looked at by an ``engine``, or that itself."""
        while isinstance(engine, _Engine):
            engine = engine.inner
        return engine


_halves = 0  # how many backwards run that go on where another ended
belongs_to_rank(__name__, "_halves", fresh=lambda _: 0)


def goes_on() -> bool:
    """Whether a backward runs that goes on with another, which was not for all and came by there."""
    return _halves > 0


@contextmanager
def _going_on() -> Iterator[None]:
    global _halves
    _halves += 1
    try:
        yield
    finally:
        _halves -= 1


_open: tuple[OwnLosses, ...] = ()
_engine: _Engine | None = None  # the one that looks, while any is open
belongs_to_rank(__name__, "_open", fresh=lambda _: ())
belongs_to_rank(__name__, "_engine", fresh=lambda _: None)
belongs_to_rank(Variable, _ENGINE, fresh=_Engine.below)


def _listen(losses: OwnLosses) -> None:
    global _open, _engine
    if _engine is None:
        _engine = _Engine(vars(Variable)[_ENGINE])
        setattr(Variable, _ENGINE, _engine)
    _open = (*(one for one in _open if one is not losses), losses)


def _forget(losses: OwnLosses) -> None:
    global _open, _engine
    _open = tuple(one for one in _open if one is not losses)
    if _open or _engine is None:
        return
    _engine.looks = False
    if vars(Variable)[_ENGINE] is _engine:
        setattr(Variable, _ENGINE, _engine.inner)
    _engine = None


@dataclass(frozen=True)
class _Way:
    """What a backward comes to: past what calls gave, ``leaves``, and what modules of these numbers were ``given``.

    ``outside``: the modules to what they gave it comes from a loss.
    """

    leaves: Sequence[Node] = ()
    given: Collection[int] = ()
    outside: Collection[int] = ()

    @staticmethod
    def of(begun: Sequence[Edge], roots: _Ends, ends: _Ends) -> "_Way":
        """That of one that has ``begun`` there, as it was called for at these ``roots``.

        Where there are ``ends`` it is for them alone, and what is left may begin anywhere on its way.
        """
        passed, gave = down(begun, _is_given, FAR)
        if written := {edge for node, _ in passed for edge in _written(node)}:
            passed, gave = down(begun, lambda *edge: edge in written or _is_given(*edge), FAR)
        losses = [edge for edge in _edges(filter(_is_loss, roots)) if not _is_given(*edge)]
        _, summed = down(losses, _is_given, FAR) if losses != [*begun] else ((), gave)
        if ends:
            for node, _ in down(gave, lambda node, _: _HALF in _kept_by(node), FAR)[0]:
                _kept_by(node)[_HALF] = True
            passed &= {*_edges(ends)}
        noted = (_noted(node).given.get(number, ()) for node, number in passed if _NOTED in _kept_by(node))
        outside = (_noted(node).gave.get(number, ()) for node, number in summed if _NOTED in _kept_by(node))
        return _Way(_leaves(passed), set().union(*noted), set().union(*outside))

    @property
    def comes_anywhere(self) -> bool:
        """Whether it does."""
        return bool(self.leaves or self.given or self.outside)


def _is_loss(root: Tensor | GradientEdge) -> bool:
    """Whether a backward of ``root`` may be that of a loss, which is one number."""
    return isinstance(root, Tensor) and root.numel() == 1


def _is_given(node: Node, number: int) -> bool:
    return _NOTED in _kept_by(node) and number in _noted(node).gave


def _written(node: Node) -> list[Edge]:
    """Where the graph of what a call gave begins below a ``node``, if that wrote to a view that the call gave."""
    below = node.next_functions[:1] if type(node).__name__ == WRITES else ()
    return [(one, number) for one, number in below if _NOTED in _kept_by(one) and number in _noted(one).viewed]


def _leaves(edges: Iterable[Edge]) -> list[Node]:
    return [node for node, _ in edges if hasattr(node, "variable")]


def _edges(tensors: Iterable[Tensor | GradientEdge]) -> Iterator[Edge]:
    for one in tensors:
        if isinstance(one, GradientEdge):
            yield one.node, one.output_nr
        elif one.grad_fn is not None:
            yield one.grad_fn, one.output_nr
        elif one.requires_grad and not torch._C._functorch.is_functorch_wrapped_tensor(one):
            with torch.inference_mode(False):  # torch looks for it by a view, which has none there
                yield get_gradient_edge(one).node, 0


def _kept_by(node: Node) -> dict[str, Any]:
    kept: dict[str, Any] = node.metadata
    return kept


def _noted(node: Node) -> _Noted:
    found: _Noted = _kept_by(node).setdefault(_NOTED, _Noted())
    return found
