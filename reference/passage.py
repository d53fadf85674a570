"""A microbatch once more, with something changed in what passes from one module of the model to the next."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
    """What passes at ``places``: on its way ``there`` becomes of the tensors, ``back`` of their gradients.

    Both are given, in this order, those that one module puts out; or where the modules are named that it passes
    ``into``, all at once, as these are given them. What other modules read is then as it was. Without places it is
    about all that the modules are given that has a gradient, each tensor by itself.
    """

    places: Sequence[Place] = ()
    there: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = _as_it_is
    back: Callable[[Values], Values] = _as_it_is
    into: Collection[str] = ()


@contextmanager
def passing(model: nn.Module, passages: Sequence[Passage]) -> Iterator[None]:
    """While this is open, all of ``passages`` are in the forwards of ``model``, and in their backwards.

    Of those that are named the modules they pass into, one behind the other in the order of these.
    """
    now: dict[Place, Tensor] = {}
    with ExitStack() as stack:
        for one in passages:
            if not one.places:
                stack.enter_context(_given(model, one))
                continue
            entering = _Entering(one, now) if one.into else None
            stack.enter_context(outputs_changed(model, entering or partial(_changed, one)))
            stack.enter_context(_entered(model, entering) if entering else nullcontext())
        yield


def _changed(passage: Passage, outputs: Outputs) -> Outputs:
    places = [place for place in passage.places if place in outputs and outputs[place].requires_grad]
    if not places:
        return {}
    made = _Changed.apply(passage, *(outputs[place] for place in places))  # type: ignore[no-untyped-call]  # in torch
    return dict(zip(places, made, strict=True))


class _Entering:
    """What was put out at the places of ``passage``, and what it becomes for those that it passes into.

    ``now`` is what is at a place after all passages so far.
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

    def entered(self, module: nn.Module, arguments: Any, named: Any) -> Any:
        """What ``module`` is given, a hook before its forward."""
        if not self._made and self._now.keys() >= set(self.passage.places):
            changed = _changed(self.passage, self._now)
            self._made = {id(self._now[place]): (self._now[place], made) for place, made in changed.items()}
            self._now |= changed
        return tree_map_only(Tensor, self._instead, (arguments, named))

    def _instead(self, tensor: Tensor) -> Tensor:
        return self._made.get(id(tensor), (tensor, tensor))[1]


def _entered(model: nn.Module, entering: _Entering) -> AbstractContextManager[None]:
    return _before(model, entering.passage.into, entering.entered)


@contextmanager
def _before(model: nn.Module, into: Collection[str], hook: Callable[..., Any]) -> Iterator[None]:
    """``hook`` is called before the forwards of the modules that are named."""
    called = [module for name, module in model.named_modules() if name in into]
    hooks = [module.register_forward_pre_hook(hook, with_kwargs=True) for module in called]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


def _given(model: nn.Module, passage: Passage) -> AbstractContextManager[None]:
    """Whatever the modules are given that ``passage`` goes into."""

    def changed(tensor: Tensor) -> Tensor:
        return _Changed.apply(passage, tensor)[0] if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]

    def entered(module: nn.Module, arguments: Any, named: Any) -> Any:
        return tree_map_only(Tensor, changed, (arguments, named))

    return _before(model, passage.into, entered)


class _Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passage: Passage, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back = passage.back
        made = passage.there(tensors)
        return tuple(one.clone() if one.requires_grad else one for one in made)  # others are new

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Values:
        return (None, *ctx.back(gradients))
