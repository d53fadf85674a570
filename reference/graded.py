"""A backward's gradients for parameters, on any way, and each use's share in a tensor's gradient."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from pipeproof.reference.accumulation import Gradient, add_parts
from pipeproof.reference.graph import consumers, ends_of, leaves_behind


def differentiate(
    objective: Tensor,
    leaves: Sequence[Tensor],
    parameters: Sequence[Tensor],
    *,
    retain_graph: bool = False,
    onto: Mapping[int, Tensor | None] = MappingProxyType({}),
) -> list[Tensor | None]:
    """Differentiate ``objective`` by ``leaves``, which stand in for a model's parameters.

    ``onto``: by a leaf's number, the tensor that its gradient is added to, in place as in autograd. A part may come to
    the parameter that is back in its module when the backward runs: an ``autograd.Function`` may write it there, as
    stores of weight gradients do; a reentrant checkpoint runs its part with it; a loss may reach it past the module.
    Earlier gradients of these, and of anything else in reach of ``objective``, stay unchanged.
    """
    held = [(tensor, tensor.grad) for tensor in (*leaves, *parameters, *leaves_behind(ends_of([objective])))]
    for tensor, _ in held:
        tensor.grad = None
    for number, begun in onto.items():
        leaves[number].grad = begun
    try:
        if objective.requires_grad:
            torch.autograd.backward(objective, retain_graph=retain_graph)
        return [_take(leaf, parameter) for leaf, parameter in zip(leaves, parameters, strict=True)]
    finally:
        for tensor, gradient in held:
            tensor.grad = gradient


def _take(leaf: Tensor, parameter: Tensor) -> Tensor | None:
    """Take the leaf's gradient, with its parameter's, and clear the latter."""
    if not leaf.requires_grad or parameter is leaf:
        return leaf.grad
    found, parameter.grad = parameter.grad, None
    if leaf.grad is None or found is None:
        return found if leaf.grad is None else leaf.grad
    return leaf.grad.add_(found)  # as autograd adds in place


_MOST = 8  # uses of one tensor: each share is kept, and a layer in a loop has very many


class ByUse:
    """Separate shares by use for ``leaves`` in the next backward from ``loss``."""

    def __init__(self, loss: Tensor, leaves: Iterable[Tensor]) -> None:
        self._given: dict[int, list[Gradient]] = {}
        wanted = {id(leaf) for leaf in leaves}
        for leaf, found in consumers(ends_of([loss]) if wanted else (), wanted).items():
            if 1 < len(found) <= _MOST:
                self._given[leaf] = [None] * len(found)
                for use, (node, argument) in enumerate(found):
                    node.register_hook(partial(self._note, leaf, use, argument))

    def _note(self, leaf: int, use: int, argument: int, gradients: tuple[Gradient, ...], _: Any) -> None:
        self._given[leaf][use] = gradients[argument]

    def of(self, leaf: Tensor, whole: Gradient) -> tuple[Gradient, ...]:
        """Each use's share, in forward order; nothing unless they add up to ``whole``, bit for bit.

        So shares that came another way are never separated.
        """
        given = self._given.get(id(leaf), [])
        total = add_parts(given[::-1])
        alike = total is not None and whole is not None and total.layout == whole.layout == torch.strided
        return tuple(given) if alike and torch.equal(total, whole) else ()  # type: ignore[arg-type]  # neither is None
