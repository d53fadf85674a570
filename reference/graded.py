"""What a backward gives to parameters, however it gives it, and what each use of a tensor gives to its gradient."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from pipeproof.reference.accumulation import Gradient, added
from pipeproof.reference.graph import FAR, consumers, down, ends_of


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


_MOST = 8  # uses of one tensor: what each gives is kept, and a layer of a loop has very many


class ByUse:
    """What the uses of ``leaves`` give in the backward of ``loss`` that comes next."""

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
        """What each use gave, in the order of the forward; nothing where these do not add up to ``whole``, every bit.

        So nothing is told apart that came another way.
        """
        given = self._given.get(id(leaf), [])
        total = added(given[::-1])
        alike = total is not None and whole is not None and total.layout == whole.layout == torch.strided
        return tuple(given) if alike and torch.equal(total, whole) else ()  # type: ignore[arg-type]  # neither is None
