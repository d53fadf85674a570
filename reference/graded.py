"""What a backward gives to parameters, however it gives it: through autograd, or by writing ``.grad`` itself."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from pipeproof.reference.graph import FAR, down, ends_of


def graded(
    objective: Tensor,
    leaves: Sequence[Tensor],
    parameters: Sequence[Tensor],
    *,
    retain_graph: bool = False,
    onto: Mapping[int, Tensor | None] = MappingProxyType({}),
) -> list[Tensor | None]:
    """The gradient of ``objective`` in each of ``leaves``, which stand in for these ``parameters`` of a model.

    ``onto``: by a leaf's number, what its gradient is added to, in place as autograd does it.

    Some of it may come to the parameter that is back in its module when the backward runs: an ``autograd.Function``
    may write it there, as stores of weight gradients do; a reentrant checkpoint runs its part with it; a loss may reach
    it past the module. What these, and whatever else ``objective`` reaches, had before stays as it was.
    """
    held = [(tensor, tensor.grad) for tensor in (*leaves, *parameters, *_reached(objective))]
    for tensor, _ in held:
        tensor.grad = None
    for number, begun in onto.items():
        leaves[number].grad = begun
    try:
        if objective.requires_grad:
            torch.autograd.backward(objective, retain_graph=retain_graph)
        return [_taken(leaf, parameter) for leaf, parameter in zip(leaves, parameters, strict=True)]
    finally:
        for tensor, gradient in held:
            tensor.grad = gradient


def _taken(leaf: Tensor, parameter: Tensor) -> Tensor | None:
    """The gradient of ``leaf``, with that of its parameter, which is then no other leaf's."""
    if not leaf.requires_grad or parameter is leaf:
        return leaf.grad
    found, parameter.grad = parameter.grad, None
    if leaf.grad is None or found is None:
        return found if leaf.grad is None else leaf.grad
    return leaf.grad.add_(found)  # as autograd adds to what is there


def _reached(objective: Tensor) -> list[Tensor]:
    """The tensors whose ``.grad`` a backward from ``objective`` adds to, as far as its graph is there already.

    What is very far down is not looked for.
    """
    passed, _ = down(ends_of([objective]), lambda *_: False, FAR)
    leaves = (getattr(node, "variable", None) for node, _ in passed)
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
