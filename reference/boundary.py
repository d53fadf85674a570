"""Tensors at the cuts of a model in stages: one device, one microbatch at a time.

The graph is cut at a pipeline's boundaries, which on one device does not change a bit.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeproof.reference.data import Batch
from pipeproof.reference.model import LossFn, Model

Tensors = tuple[Tensor, ...]
Gradients = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Boundary:
    """One microbatch's tensors at the cuts; entry s of each field belongs to stage s.

    ``outputs[-1]`` goes into the loss function; ``loss`` is undivided. ``output_gradients``: the start of each stage's
    backward, the last one's included; ``input_gradients``: its result. ``flows``: gradients of each output in that
    backward, including those from other outputs made from it. All empty for evaluation.
    """

    inputs: tuple[Tensors, ...]
    outputs: tuple[Tensors, ...]
    loss: Tensor
    output_gradients: tuple[Gradients, ...] = ()
    input_gradients: tuple[Gradients, ...] = ()
    flows: tuple[Gradients, ...] = ()


def boundary(
    model: Model, batch: Batch, *, stages: Sequence[range], loss_fn: LossFn, divisor: float, training: bool = True
) -> Boundary:
    """Run ``batch`` through ``model`` cut into ``stages``, ranges of layers, and back unless in evaluation."""
    model.train(training)
    with nullcontext() if training else torch.no_grad():
        inputs, outputs, given = [], [], batch.inputs
        for layers in stages:
            inputs.append(tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in given))
            given = model.through(layers, inputs[-1])
            outputs.append(given)
        (output,) = outputs[-1]
        loss = loss_fn(output, batch.target)
    made = Boundary(tuple(inputs), tuple(map(_plain, outputs)), loss.detach())
    return _backward(made, outputs, loss / divisor) if training else made


def _backward(made: Boundary, outputs: Sequence[Tensors], objective: Tensor) -> Boundary:
    received: list[Gradients] = [_gradients((objective,), (None,), outputs[-1])]
    handed_on: list[Gradients] = []
    flows: list[Gradients] = []
    for stage in reversed(range(len(outputs))):
        flows.insert(0, _gradients(outputs[stage], received[0], outputs[stage]))
        handed_on.insert(0, _gradients(outputs[stage], received[0], made.inputs[stage]))
        if stage:
            received.insert(0, handed_on[0])
    plain = tuple(map(_plain, made.inputs))
    return Boundary(plain, made.outputs, made.loss, tuple(received), tuple(handed_on), tuple(flows))


def _gradients(outputs: Tensors, received: Gradients, inputs: Tensors) -> Gradients:
    """Compute input gradients, None without flow."""
    given = [
        (output, gradient)
        for output, gradient in zip(outputs, received, strict=True)
        if output.requires_grad and (gradient is not None or output.dim() == 0)
    ]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if not given or not wanted:
        return (None,) * len(inputs)
    ends, starts = [output for output, _ in given], [gradient for _, gradient in given]
    found = iter(torch.autograd.grad(ends, wanted, starts, retain_graph=True, allow_unused=True))
    return tuple(next(found) if tensor.requires_grad else None for tensor in inputs)


def _plain(tensors: Tensors) -> Tensors:
    return tuple(tensor.detach() for tensor in tensors)
