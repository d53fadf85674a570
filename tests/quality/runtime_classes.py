"""A module that is a pipeline: it distributes the layers by itself, and a trainer runs it, AFAB or 1F1B.

Each ``fault`` is at its place in the code; the empty name is the pipeline as it should be.
"""

from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from runtime_plain import one_f_one_b
from torch import Tensor, nn
from truth_models import Pairs, Place, loss_fn, observed, squares, through


class PipelineParallel(nn.Module):
    """The layers of one rank."""

    def __init__(self, model: nn.Sequential, place: Place) -> None:
        super().__init__()
        self.place = place
        self.layers = nn.ModuleDict({str(number): model[number] for number in self.distribute(len(model))})

    def distribute(self, n_layers: int) -> list[int]:
        """The numbers of this rank's layers."""
        place = self.place
        each = [n_layers // place.ranks + (r < n_layers % place.ranks) for r in range(place.ranks)]
        first = sum(each[: place.rank])
        numbers = list(range(first, first + each[place.rank]))
        if place.at("layers in the other order", 2):
            return numbers[::-1]
        return numbers[:-1] if place.at("last layer forgotten", 1) else numbers

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in self.layers.items():
            if self.place.fault == "other epsilon" and number == "5":
                layer.norm.eps = 1e-2
            residual = self.place.fault == "layer without its residual" and number == "2"
            x = layer(x) - x if residual else layer(x)
        return x

    def backward(self, given: Tensor | None, output: Tensor, gradient: Tensor | None) -> Tensor | None:
        """The gradient of what was given."""
        torch.autograd.backward(output, grad_tensors=gradient)
        return given.grad if given is not None else None


class Trainer(Place):
    """Runs the pipeline of one rank."""

    def __init__(self, module: nn.Module, plain: PipelineParallel, microbatches: Pairs) -> None:
        super().__init__(plain.place.fault)
        self.module, self.plain, self.microbatches = module, plain, microbatches
        self.loaded = iter(microbatches)
        self.inputs: list[Any] = []
        self.outputs: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.works: list[Any] = []
        self.forwards, self.backwards = count(), count()

    def communicate(self, operation: str, tensor: Tensor | None = None) -> Tensor | None:
        """recv_forward, send_forward, recv_backward or send_backward."""
        towards_last = operation in ("send_forward", "recv_backward")
        peer = self.rank + (1 if towards_last else -1)
        if not 0 <= peer <= self.last:
            return None
        if operation.startswith("send"):
            assert tensor is not None, "there is something to send"
            self.works.append((dist.isend(tensor, peer), tensor))
            return None
        buffer = torch.empty_like(self.microbatches[0][0])
        dist.irecv(buffer, peer).wait()
        return buffer.requires_grad_(operation == "recv_forward")

    def forward_one(self) -> None:
        number = next(self.forwards)
        given = self.communicate("recv_forward")
        inputs, target = next(self.loaded)
        if self.at("always the first targets", 3):
            target = self.microbatches[0][1]
        if given is not None and self.at("received twice", 2) and number == 3:
            given = self.inputs[-1].detach().clone().requires_grad_()
        output = self.module(inputs if given is None else given)
        message = output.detach()
        if self.at("one stage hands on bf16", 0):
            message = through(torch.bfloat16)(message)
        self.communicate("send_forward", message)
        if self.rank == self.last:
            loss = loss_fn(output, target)
            if self.fault == "loss of sums":
                loss = loss * output.numel()
            self.losses.append(loss.detach())
            output = loss if self.fault == "steps of accumulation forgotten" else loss / len(self.microbatches)
        self.inputs.append(given)
        self.outputs.append(output)

    def backward_one(self) -> None:
        number = next(self.backwards)
        gradient = self.communicate("recv_backward")
        newest = self.at("stash last in first out", 1)
        given, output = self.inputs.pop(-1 if newest else 0), self.outputs.pop(-1 if newest else 0)
        if self.at("cleared in the middle", 2) and number == 4:
            self.module.zero_grad()
        if gradient is not None and self.at("gradient plus noise", 1) and number == 2:
            draw = torch.Generator().manual_seed(5)
            gradient = gradient + gradient.norm() * torch.randn(gradient.shape, generator=draw)
        if gradient is not None and self.at("gradients doubled on arrival", 0):
            gradient = gradient * 2
        negated = self.at("last microbatch negated", 1) and number == len(self.microbatches) - 1
        self.negate(negated)
        made = self.plain.backward(given, output, gradient)
        self.negate(negated)
        if made is not None:
            self.communicate("send_backward", made)

    def negate(self, negated: bool) -> None:
        for parameter in self.module.parameters() if negated else ():
            parameter.grad = None if parameter.grad is None else -parameter.grad

    def run(self, ahead: int) -> None:
        """All forwards, then all backwards, or one of each in turn; first in first out."""
        for kind, _ in one_f_one_b(ahead, len(self.microbatches)):
            (self.forward_one if kind == "F" else self.backward_one)()
        for work, _ in self.works:
            work.wait()
        for name, parameter in self.plain.named_parameters():
            gradient = parameter.grad
            if gradient is None:
                continue
            if self.at("weight transposed", 2) and name.endswith("4.linear.weight"):
                gradient.copy_(gradient.T.clone())
            if self.at("biases zeroed", 0) and name.endswith("bias"):
                gradient.zero_()


def step(model: nn.Sequential, microbatches: Pairs, *, fault: str = "", watched: bool = True, afab: bool = True) -> Any:
    """One step on four ranks; hands back the pipeline, the losses and the norm."""
    pipeline = PipelineParallel(model, Place(fault))
    trainer = Trainer(observed(pipeline, watched), pipeline, microbatches)
    trainer.run(len(microbatches) if afab else trainer.last - trainer.rank)
    norm = squares(pipeline)
    dist.all_reduce(norm)
    norm = norm.sqrt()
    for parameter in pipeline.parameters() if fault == "clipped before it was handed back" else ():
        if parameter.grad is not None:
            parameter.grad.mul_(min(1.0, 0.05 / (norm.item() + 1e-6)))
    losses = trainer.losses
    if fault == "losses in fp16":
        losses = [loss.half().float() for loss in losses]
    return pipeline, losses or None, norm
