"""A microbatch once more, with something changed in what passes from one module of the model to the next."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof.reference.outputs import Outputs, Place, outputs_changed

Values = tuple[Tensor | None, ...]


def _as_it_is(values: Any) -> Any:
    return values


@dataclass(frozen=True)
class Passage:
    """What passes at ``places``: on its way ``there`` becomes of the tensors, ``back`` of their gradients.

    Both are given, in the order of the outputs, those that one module puts out.
    """

    places: Collection[Place]
    there: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] = _as_it_is
    back: Callable[[Values], Values] = _as_it_is


@contextmanager
def passing(model: nn.Module, passages: Sequence[Passage]) -> Iterator[None]:
    """While this is open, all of ``passages`` are in the forwards of ``model``, and in their backwards."""
    with ExitStack() as stack:
        for one in passages:
            stack.enter_context(outputs_changed(model, partial(_changed, one)))
        yield


def _changed(passage: Passage, outputs: Outputs) -> Outputs:
    places = [place for place in outputs if place in passage.places and outputs[place].requires_grad]
    if not places:
        return {}
    made = _Changed.apply(passage, *(outputs[place] for place in places))  # type: ignore[no-untyped-call]  # in torch
    return dict(zip(places, made, strict=True))


class _Changed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, passage: Passage, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back = passage.back
        return tuple(tensor.clone() for tensor in passage.there(tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Values:
        return (None, *ctx.back(gradients))
