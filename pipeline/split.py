"""Split a backward in two: the inputs' gradients first, the weights' later, nothing computed twice.

Zero-bubble schedules (Qi et al., arXiv 2401.10241) hand the input gradient on before the weights' is computed. Autograd
has no such cut, so the graph of one microbatch is cut here:

- In the forward, every use of a parameter in a torch call gets a node of its own, a view (``NamedUses``). A weight that
  is used twice on a path is then two leaves, and the engine can be asked for one without walking on to the other.
- ``input`` runs the engine towards the stage's inputs alone. A node on the way that leads to weights too keeps its
  incoming gradient. Then activations that only the way to the inputs needed are freed.
- ``weight`` runs the engine one node long from each of those to its weights, and adds all shares to the parameters in
  one backward: sums are formed in the same order as in a full backward, and hooks fire as often.

Some nodes cannot do half of their work: a Python ``autograd.Function`` computes all its gradients at once, and a
checkpointed region would be recomputed. Their shares for weights are computed with the inputs' gradients, kept, and
added by ``weight`` all the same; ``undeferred`` says which and why. If not even that is possible ``input`` does the
full backward, and says so too.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.overrides import TorchFunctionMode

from pipeproof.pipeline.boundary import Gradients, Tensors

Shares = list[tuple[GradientEdge, Tensor]]  # tensors still to be added, and their places in the graph


class NamedUses(TorchFunctionMode):
    """While active, torch calls get views of trainable parameters as arguments. ``views``: their nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.views: set[Node] = set()

    def __torch_function__(self, func: Callable[..., Any], types: object, *rest: Any) -> Any:
        # torch calls this with the function's arguments and, if there are any, its keyword arguments.
        args, kwargs = (*rest, (), {})[:2]
        return func(*map(self._name, args), **{name: self._name(value) for name, value in (kwargs or {}).items()})

    def _name(self, value: Any) -> Any:
        if isinstance(value, nn.Parameter) and value.requires_grad and torch.is_grad_enabled():
            with torch._C.DisableTorchFunction():
                view = value.view_as(value)
            assert view.grad_fn is not None, "a view of a parameter that requires a gradient has a node"
            self.views.add(view.grad_fn)
            return view
        if isinstance(value, list | tuple) and any(isinstance(member, nn.Parameter) for member in value):
            return type(value)(map(self._name, value))
        return value


class SplitBackward:
    """A microbatch's backward through a stage: call ``input``, then ``weight``, each once."""

    def __init__(self, inputs: Tensors, outputs: Tensors, views: set[Node]) -> None:
        self._inputs = inputs
        self._outputs = outputs
        self._views = views
        self._deferred: list[_Deferred] = []
        self._shares: Shares = []
        self._held: set[int] = set()  # the storages of gradients that others hold too
        self.undeferred: tuple[str, ...] = ()

    def input(self, gradients: Gradients) -> Gradients:
        """Compute a gradient or None per input. ``gradients``: one per output; the parameters' stay unchanged."""
        given = [
            (get_gradient_edge(output), grad)
            for output, grad in zip(self._outputs, gradients, strict=True)
            if grad is not None and output.requires_grad
        ]
        leaves = [tensor for tensor in self._inputs if tensor.requires_grad]
        ends = [*map(get_gradient_edge, leaves)]
        graph = _Graph([edge.node for edge, _ in given], {edge.node for edge in ends}, self._views)
        if graph.whole:
            self.undeferred = (graph.whole,)
            torch.autograd.backward([edge for edge, _ in given], [grad for _, grad in given])
            found: Sequence[Tensor | None] = [leaf.grad for leaf in leaves]
        else:
            found = self._towards(ends, given, graph)
        own = dict(zip(map(id, leaves), found, strict=True))
        result = tuple(own.get(id(tensor)) for tensor in self._inputs)
        self._held = {_storage(grad) for grad in (*gradients, *result) if grad is not None}
        self._inputs = self._outputs = ()
        return result

    def weight(self) -> None:
        """Add this microbatch's share to the parameters' gradients."""
        shares = [*self._shares, *(share for one in self._deferred for share in one.shares())]
        self._shares, self._deferred = [], []
        if shares:
            torch.autograd.backward([edge for edge, _ in shares], [self._own(grad) for _, grad in shares])

    def _own(self, grad: Tensor) -> Tensor:
        """Return ``grad`` in an exclusive storage.

        Later shares are added in place, and ``x + w`` gives both one gradient, which x's reader may still need.
        """
        place = _storage(grad)
        shared = place in self._held
        self._held.add(place)
        return grad.clone() if shared else grad

    def _towards(self, ends: Sequence[GradientEdge], given: Shares, graph: "_Graph") -> Sequence[Tensor | None]:
        """Run the engine from ``given`` to ``ends``; keep gradients for the weights, free the rest."""
        self._shares = [(edge, grad) for edge, grad in given if edge.node not in graph.on_the_way]
        roots = [(edge, grad) for edge, grad in given if edge.node in graph.on_the_way]
        if not roots:
            return [None] * len(ends)
        self._deferred, early, self.undeferred = graph.plan()
        hooks = [one.node.register_prehook(one.keep) for one in self._deferred]
        found = torch.autograd.grad(
            [edge for edge, _ in roots],
            [*ends, *early],
            [grad for _, grad in roots],
            retain_graph=True,
            allow_unused=True,
        )
        for hook in hooks:
            hook.remove()
        self._shares += [(e, g) for e, g in zip(early, found[len(ends) :], strict=True) if g is not None]
        graph.let_go(keep={one.node for one in self._deferred})
        return found[: len(ends)]


def _storage(grad: Tensor) -> int:
    """Get the storage address; for a DTensor, this rank's part."""
    local = getattr(grad, "to_local", None)
    return (grad if local is None else local()).untyped_storage().data_ptr()


class _Deferred:
    """A node on the way to the inputs with waiting weights: its incoming gradient, and uses of weights behind it."""

    def __init__(self, node: Node, uses: Sequence[Node]) -> None:
        self.node = node
        self.uses = uses
        self._arrived: Gradients = ()

    def keep(self, arrived: Gradients) -> None:
        self._arrived = arrived

    def shares(self) -> Iterator[tuple[GradientEdge, Tensor]]:
        """Compute the share of each use by the engine. A use has one node that leads to it, so nothing else is run."""
        given = [(GradientEdge(self.node, k), grad) for k, grad in enumerate(self._arrived) if grad is not None]
        if given:
            edges = [GradientEdge(use, 0) for use in self.uses]
            found = torch.autograd.grad([e for e, _ in given], edges, [g for _, g in given], allow_unused=True)
            yield from ((edge, grad) for edge, grad in zip(edges, found, strict=True) if grad is not None)


@dataclass(frozen=True)
class _Branch:
    """An edge from a node on the way to the inputs to one that leads to weights alone, and the uses behind it."""

    node: Node
    child: GradientEdge
    uses: frozenset[Node]


class _Graph:
    """Nodes between a stage's outputs and its inputs and parameters, with everything behind each."""

    def __init__(self, roots: Sequence[Node], ends: set[Node], views: set[Node]) -> None:
        self._views = views
        self.on_the_way: set[Node] = set()
        uses: dict[Node, frozenset[Node]] = {}  # of the others: the uses, or parameters used unseen, behind them
        raw: set[Node] = set()
        named: set[Node] = set()
        for node in _children_first(roots):
            children = [child for child, _ in node.next_functions if child is not None]
            if node in ends or any(child in self.on_the_way for child in children):
                self.on_the_way.add(node)
            elif node in views:
                uses[node] = frozenset({node})
                named.update(children)
            elif not children:
                uses[node] = frozenset({node})
            else:
                uses[node] = frozenset[Node]().union(*(uses[child] for child in children))
            if node not in views:
                raw.update(child for child in children if not child.next_functions and child not in ends)
        self._branches = [
            _Branch(node, GradientEdge(child, number), uses[child])
            for node in self.on_the_way
            for child, number in node.next_functions
            if child is not None and child not in self.on_the_way and uses[child]
        ]
        self.whole = ""  # why the backward cannot be cut at all
        if raw & named:
            self.whole = "a parameter is used both in torch calls and inside an autograd.Function"
        elif any("CheckpointFunction" in node.name() for node in self.on_the_way):
            self.whole = "reentrant checkpointing adds to the parameters by itself"

    def plan(self) -> tuple[list[_Deferred], list[GradientEdge], tuple[str, ...]]:
        """Nodes with waiting weights; edges with gradients computed beside the inputs'; and the reasons."""
        owners: dict[Node, set[Node]] = {}
        for branch in self._branches:
            for use in branch.uses:
                owners.setdefault(use, set()).add(branch.node)
        deferred: dict[Node, list[Node]] = {}
        early: dict[tuple[Node, int], GradientEdge] = {}
        reasons = []
        for branch in self._branches:
            shared = any(len(owners[use]) > 1 for use in branch.uses)
            reason = "what it shares with others is made of parameters" if shared else self._why_early(branch)
            if reason:
                early[branch.child.node, branch.child.output_nr] = branch.child
                reasons.append(f"{branch.node.name()}: {reason}")
            else:
                deferred.setdefault(branch.node, []).extend(branch.uses)
        return [_Deferred(node, uses) for node, uses in deferred.items()], list(early.values()), tuple(reasons)

    def _why_early(self, branch: _Branch) -> str:
        node: object = branch.node  # torch's stubs have the two classes unrelated
        if isinstance(node, BackwardCFunction):
            return "an autograd.Function computes all its gradients at once"
        if not branch.uses <= self._views:
            return "a parameter is used where no torch call shows it"
        if any(_is_packed(saved) for saved in _list_saved(branch.node)):
            return "its activations are recomputed, or kept elsewhere by hooks"
        return ""

    def let_go(self, *, keep: set[Node]) -> None:
        """Free activations of nodes on the way, except ``keep``."""
        for node in self.on_the_way - keep:
            for saved in _list_saved(node):
                if not _is_packed(saved) and saved.data is not None:
                    saved.register_hooks(_drop, _discard)


def _children_first(roots: Iterable[Node]) -> Iterator[Node]:
    done: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            if node not in done:
                done.add(node)
                yield node
        elif node not in done:
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions if child is not None and child not in done)


def needs(outputs: Iterable[Tensor], tensor: Tensor) -> bool:
    """True if the backward from ``outputs`` reads ``tensor``, or may read it."""
    place, roots = _storage(tensor), [output.grad_fn for output in outputs if output.grad_fn is not None]
    for node in _children_first(roots):
        unseen: object = node  # torch's stubs have the two classes unrelated
        if isinstance(unseen, BackwardCFunction):
            return True
        if any(_is_packed(one) or (one.data is not None and _may_lie_at(place, one.data)) for one in _list_saved(node)):
            return True
    return False


def _may_lie_at(place: int, tensor: Tensor) -> bool:
    """True if the numbers may lie there. A DTensor has none of its own: its part may."""
    try:
        return _storage(tensor) == place
    except RuntimeError:
        return True


@lru_cache(maxsize=1024)
def _list_saved_names(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _list_saved(node: Node) -> Iterator[Any]:
    """List the tensors that ``node`` saved for its backward, in autograd's wrappers."""
    for name in _list_saved_names(type(node)):
        value = getattr(node, name)
        yield from (one for one in (value if isinstance(value, list | tuple) else [value]) if one is not None)


def _is_packed(saved: Any) -> bool:
    """True if hooks have packed the tensor already, as in checkpointing."""
    return saved.unpack_hook is not None


def _drop(tensor: Tensor) -> None:
    """Pack a tensor by freeing it."""


def _discard(nothing: None) -> Tensor:
    raise AssertionError("an activation that was let go is needed after all: a backward was run twice")
