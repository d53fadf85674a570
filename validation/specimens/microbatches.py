"""Faults of bookkeeping: a microbatch lost or exchanged, an activation overwritten or poisoned."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from pipeline.boundary import Gradients, Tensors
from pipeline.stage import Goal
from pipeline.step import Parts
from pipeline.transport import Message, Transport
from reference.data import Batch
from validation.around import AroundStage, AroundTransport
from validation.specimens.specimen import Specimen


class _DropsFirst(AroundStage):
    """Microbatch 0's backward hands its gradient on and leaves the parameters' gradients as they were."""

    def backward(self, microbatch: int, gradients: Gradients) -> Gradients:
        with self._dropping(microbatch):
            return self.inner.backward(microbatch, gradients)

    def backward_weight(self, microbatch: int) -> None:
        with self._dropping(microbatch):
            self.inner.backward_weight(microbatch)

    @contextmanager
    def _dropping(self, microbatch: int) -> Iterator[None]:
        kept = [(p, None if p.grad is None else p.grad.clone()) for p in self.module.parameters()]
        yield
        if microbatch == 0:
            for parameter, gradient in kept:
                parameter.grad = gradient


def _drop_first(parts: Parts) -> Parts:
    return replace(parts, stages=tuple(map(_DropsFirst, parts.stages)))


def _swap_inputs(batches: Sequence[Batch], parts: Parts) -> Sequence[Batch]:
    if len(batches) < 2 or all(stage.index != 0 for stage in parts.stages):
        return batches
    first, second, *rest = batches
    return [replace(first, inputs=second.inputs), replace(second, inputs=first.inputs), *rest]


class _OneBuffer(AroundTransport):
    """Everything received on this rank lies in one buffer, whatever is still needed of the last message."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def receive(self, message: Message) -> Tensor:
        arrived = self.inner.receive(message)
        if len(self._buffer) < len(arrived):
            self._buffer = torch.empty(len(arrived), dtype=torch.uint8, device=arrived.device)
        # .data: a network card does not tell autograd that it writes, and neither does this.
        view = self._buffer.data[: len(arrived)]
        view.copy_(arrived)
        return view


def _one_buffer(parts: Parts) -> Parts:
    return replace(parts, transport=_OneBuffer(parts.transport), gradients=parts.gradients)


class _Poisons(AroundStage):
    def forward(self, microbatch: int, inputs: Tensors, goal: Goal | None) -> Tensors:
        if self.index == 1 and microbatch == 1:
            inputs = tuple(torch.full_like(x, float("nan")) if x.is_floating_point() else x for x in inputs)
            inputs = tuple(x.requires_grad_(x.is_floating_point()) for x in inputs)
        return self.inner.forward(microbatch, inputs, goal)


def _poison(parts: Parts) -> Parts:
    return replace(parts, stages=tuple(map(_Poisons, parts.stages)))


SPECIMENS = (
    Specimen(
        name="microbatch-dropped",
        summary="the first microbatch's backward adds nothing to the parameters' gradients",
        origin="pytorch/torchtitan#3575, NVIDIA-NeMo/Automodel#3530",
        smallest="naive r1 s1 m2 split=1 model=mlp plan=train seed=0",
        law="gradient",
        plant=_drop_first,
    ),
    Specimen(
        name="microbatches-swapped",
        summary="the first stage reads microbatches 0 and 1 in the other order than the last stage its targets",
        origin="pytorch/PiPPy#1052 and the class of messages matched by position",
        smallest="naive r1 s1 m2 split=1 model=mlp plan=train seed=0",
        law="loss",
        feed=_swap_inputs,
    ),
    Specimen(
        name="receive-buffer-reused",
        summary="a rank receives everything into one buffer, so a kept activation is overwritten before its backward",
        origin="pytorch/pytorch#185331, pytorch/PiPPy#1055",
        smallest="naive r3 s3 m1 split=1,1,1 model=mlp plan=train seed=0",
        law="gradient",
        plant=_one_buffer,
    ),
    Specimen(
        name="activation-nan",
        summary="stage 1 is given NaN in place of microbatch 1's activation",
        origin="pytorch/PiPPy#585, torchtitan#771",
        smallest="naive r2 s2 m2 split=1,1 model=mlp plan=train seed=0",
        law="loss",
        plant=_poison,
    ),
)
