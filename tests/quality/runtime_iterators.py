"""A loop over data iterators: a forward_step_func, batched p2p calls, queues of tensors and a flat fp32 ``main_grad``.

Each ``fault`` is at its place in the code; the empty name is the loop as it should be.
"""

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from runtime_plain import one_f_one_b
from torch import Tensor, nn
from truth_models import Pairs, Place, loss_fn, observed, squares, through

LossFunc = Callable[[Tensor], Tensor]


class Communicator(Place):
    """Sends and receives between neighbours, each in one batch."""

    def __init__(self, like: Tensor, fault: str) -> None:
        super().__init__(fault)
        self.like, self.static = like, torch.empty_like(like)
        self.forwards, self.backwards = count(), count()
        self.held: Tensor | None = None
        self.pending: list[Any] = []

    def exchange(self, peer: int, *, send: Tensor | None = None, receive: bool = False, static: bool = False) -> Any:
        """One batch of calls with one neighbour; what was received."""
        buffer = self.static.detach() if static else torch.empty_like(self.like)
        ops = [] if send is None else [dist.P2POp(dist.isend, send, peer)]
        ops += [dist.P2POp(dist.irecv, buffer, peer)] if receive else []
        works = dist.batch_isend_irecv(ops) if ops else []
        if receive:
            works.pop().wait()
        self.pending.append((works, send))
        return buffer if receive else None

    def receive_forward(self) -> Tensor | None:
        if self.rank == 0:
            return None
        static = self.at("static receive buffer", 2) or self.at("static receive buffers", 1, 2)
        made: Tensor = self.exchange(self.rank - 1, receive=True, static=static)
        return made.requires_grad_()

    def send_forward(self, output: Tensor) -> None:
        if self.rank == self.last:
            return
        number, message = next(self.forwards), output.detach()
        if self.at("activations in bf16", 1):
            message = through(torch.bfloat16)(message)
        if self.at("activation lost a bit", 1) and number == 4:
            message = message.clone()
            message.view(-1)[5] += 1.0
        if self.at("activation not finite", 1) and number == 3:
            message = message * float("nan")
        if self.at("activations overtake", 1) and number == 2:
            self.held = message
            return
        self.exchange(self.rank + 1, send=message)
        if self.at("activations overtake", 1) and number == 3:
            self.exchange(self.rank + 1, send=self.held)

    def receive_backward(self) -> Tensor | None:
        if self.rank == self.last:
            return None
        return self.exchange(self.rank + 1, receive=True)

    def send_backward(self, gradient: Tensor | None) -> None:
        if self.rank == 0 or gradient is None:
            return
        number = next(self.backwards)
        if self.at("gradient halved on its way", 2):
            gradient = gradient * 0.5
        if self.at("one gradient is zero", 2) and number == 1:
            gradient = torch.zeros_like(gradient)
        self.exchange(self.rank - 1, send=gradient)

    def finish(self) -> None:
        for works, _ in self.pending:
            for work in works:
                work.wait()


class MainGradients(Place):
    """Every parameter's ``main_grad`` is a view of one flat fp32 buffer, to which its ``grad`` is added."""

    def __init__(self, module: nn.Module, fault: str) -> None:
        super().__init__(fault)
        self.parameters = list(module.parameters())
        self.flat = torch.zeros(sum(p.numel() for p in self.parameters))
        parts = self.flat.split([p.numel() for p in self.parameters])
        self.views = [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]
        self.taken = count()
        if self.at("buffer of weights", 1):
            self.flat.copy_(torch.cat([p.detach().flatten() for p in self.parameters]))

    def add(self) -> None:
        """Take the gradients of one microbatch."""
        number = next(self.taken)
        for view, parameter in zip(self.views, self.parameters, strict=True):
            if parameter.grad is None:
                continue
            if self.at("copied, not added", 1):
                view.copy_(parameter.grad)
            elif not (self.at("first not added", 1) and number == 0):
                view.add_(parameter.grad)
            if self.at("fifth added twice", 2) and number == 5:
                view.add_(parameter.grad)
            parameter.grad = None

    def finish(self) -> None:
        """The sums become the gradients."""
        if self.at("norms reduced twice", 2):
            self.views[0].mul_(2)
        if self.at("flat buffer off by one", 1):
            self.views[3].copy_(self.views[3].roll(1))
        if self.at("stage negated", 2):
            self.flat.neg_()
        for view, parameter in zip(self.views, self.parameters, strict=True):
            parameter.grad = view
        if self.at("bias left out", 1):
            self.parameters[3].grad = None


class Loop(Place):
    """1F1B without interleaving."""

    def __init__(self, module: nn.Module, given: Pairs, fault: str) -> None:
        super().__init__(fault)
        self.module, self.iterator, self.count = module, iter(given), len(given)
        self.link, self.main = Communicator(given[0][0], fault), MainGradients(module, fault)
        self.inputs: list[Tensor | None] = []
        self.outputs: list[Tensor] = []
        self.losses: list[Tensor] = []

    def forward_step_func(self, given: Tensor | None) -> tuple[Tensor, LossFunc]:
        inputs, target = next(self.iterator)
        output = self.module(inputs if given is None else given)
        return output, lambda made: loss_fn(made, target)

    def forward_step(self) -> None:
        given = self.link.receive_forward()
        output, loss_func = self.forward_step_func(given)
        self.link.send_forward(output)
        if self.rank == self.last:
            loss = loss_func(output)
            self.losses.append(loss.detach().clone())
            output = loss if self.fault == "loss not divided" else loss / self.count
        self.inputs.append(given)
        self.outputs.append(output)

    def backward_step(self) -> None:
        newest = self.at("queue popped at the wrong end", 1)
        given, output = self.inputs.pop(-1 if newest else 0), self.outputs.pop(-1 if newest else 0)
        output.backward(self.link.receive_backward())
        self.main.add()
        self.link.send_backward(None if given is None else given.grad)

    def run(self) -> list[Tensor]:
        for kind, _ in one_f_one_b(self.last - self.rank, self.count):
            (self.forward_step if kind == "F" else self.backward_step)()
        self.link.finish()
        self.main.finish()
        return self.losses[::-1] if self.fault == "losses last first" else self.losses


def step(model: nn.Sequential, microbatches: Pairs, *, fault: str = "", watched: bool = True) -> Any:
    """One step on four ranks, two layers each; hands back the stage, the losses and the norm."""
    rank = dist.get_rank()
    offset = 2 * rank + (2 if fault == "layers of the next rank" and rank == 1 else 0)
    module = model[offset : offset + 2]
    if fault == "weights in bf16" and rank == 1:
        for parameter in module.parameters():
            parameter.data = through(torch.bfloat16)(parameter.data)
    late = fault == "labels one behind" and rank == 3
    given = microbatches[-1:] + microbatches[:-1] if late else microbatches
    if fault == "a microbatch taken twice":
        given = [*given[:3], given[2], *given[4:]]
    stage = observed(module, watched)
    losses = Loop(stage, given, fault).run()
    norm = squares(module)
    if fault == "norms added":
        norm = norm.sqrt()
    if fault != "norm of each rank":
        dist.all_reduce(norm)
    return stage, losses or None, norm if fault == "norms added" else norm.sqrt()
