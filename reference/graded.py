"""What a backward gives to parameters, however it gives it: through autograd, or by writing ``.grad`` itself."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor


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

    An ``autograd.Function`` may write the gradient of its weight itself, as stores of weight gradients do: to the leaf,
    or to the parameter that is back in its module when the backward runs. What either had before stays as it was.
    """
    held = [(tensor, tensor.grad) for tensor in (*leaves, *parameters)]
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
    """The gradient of ``leaf``; or that of its parameter, which is then no other leaf's."""
    if leaf.grad is not None or not leaf.requires_grad:
        return leaf.grad
    found, parameter.grad = parameter.grad, None
    return found
