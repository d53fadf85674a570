"""Repeat a microbatch with a change between modules."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from pipeproof.reference.outputs import Outputs, Place, outputs_changed

Values = tuple[Tensor | None, ...]


def _as_it_is(values: Any) -> Any:
    return values


@dataclass(frozen=True)
class Passage:
    """A change at ``places``: ``there`` maps the tensors on their way, ``back`` their gradients.

    Both get, in this order, the outputs of one module; or, with names of consumers ``into``, all at once, as their
    inputs. Other modules then read the original. Without places it changes every input with a gradient, each tensor by
    itself.
    """

    places: Sequence[Place] = ()
    there: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = _as_it_is
    back: Callable[[Values], Values] = _as_it_is
    into: Collection[str] = ()


@contextmanager
def passing(model: nn.Module, passages: Sequence[Passage]) -> Iterator[None]:
    """Apply all ``passages`` in forwards of ``model``, and in their backwards.

    Passages into the same named modules apply one after the other, in order.
    """
    now: dict[Place, Tensor] = {}
    with ExitStack() as stack:
        for one in passages:
            entering = _Entering(one, now)
            if one.places:
                stack.enter_context(outputs_changed(model, entering if one.into else partial(_change, one)))
            for name, module in model.named_modules():
                if name in one.into:
                    stack.enter_context(module.register_forward_pre_hook(entering.on_enter, with_kwargs=True))
        yield


def _change(passage: Passage, outputs: Outputs) -> Outputs:
    places = [place for place in passage.places if place in outputs and outputs[place].requires_grad]
    if not places:
        return {}
    made = _Changed.apply(passage, *(outputs[place] for place in places))  # type: ignore[no-untyped-call]  # in torch
    return dict(zip(places, made, strict=True))


class _Entering:
    """Outputs at the places of ``passage``, and their changed versions for its consumers; else their inputs' own.

    ``now``: the tensors at each place after all passages so far.
    """

    def __init__(self, passage: Passage, now: dict[Place, Tensor]) -> None:
        self.passage, self._now = passage, now
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # by id, which is its own as long as this has it

    def __call__(self, outputs: Outputs) -> Outputs:
        came = {place: tensor for place, tensor in outputs.items() if place in self.passage.places}
        if came:
            self._made = {}
        self._now |= came
        return {}

    def on_enter(self, module: nn.Module, arguments: Any, named: Any) -> Any:
        """Change the module's inputs, in a hook before its forward."""
        if not self._made and self.passage.places and self._now.keys() >= set(self.passage.places):
            changed = _change(self.passage, self._now)
            self._made = {id(self._now[place]): (self._now[place], made) for place, made in changed.items()}
            self._now |= changed
        return tree_map_only(Tensor, self._instead, (arguments, named))

    def _instead(self, tensor: Tensor) -> Tensor:
        if self.passage.places or not tensor.requires_grad:
            return self._made.get(id(tensor), (tensor, tensor))[1]
        (made,) = _Changed.apply(self.passage, tensor)  # type: ignore[no-untyped-call]  # in torch
        return made  # type: ignore[no-any-return]


class _Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passage: Passage, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back = passage.back
        made = passage.there(tensors)
        return tuple(one.clone() if one.requires_grad else one for one in made)  # others are new

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Values:
        return (None, *ctx.back(gradients))
