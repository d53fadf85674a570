"""A loop over data iterators: a forward_step_func, batched p2p calls, queues of tensors and a flat fp32 ``main_grad``.

Each ``fault`` is at its place in the code; the empty name is the loop as it should be.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from truth_models import Pairs, loss_fn, observed, squares, through

LossFunc = Callable[[Tensor], Tensor]


class Communicator:
    """Sends and receives between neighbours, each in one batch."""

    def __init__(self, like: Tensor, fault: str) -> None:
        self.like, self.fault = like, fault
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        self.static = torch.empty_like(like)
        self.sent_forward = self.sent_backward = 0
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
        static = self.rank in {"static receive buffer": (2,), "static receive buffers": (1, 2)}.get(self.fault, ())
        made: Tensor = self.exchange(self.rank - 1, receive=True, static=static)
        return made.requires_grad_()

    def send_forward(self, output: Tensor) -> None:
        if self.rank == self.last:
            return
        number, self.sent_forward = self.sent_forward, self.sent_forward + 1
        message = output.detach()
        if self.rank == 1:
            if self.fault == "activations in bf16":
                message = through(torch.bfloat16)(message)
            if self.fault == "activation lost a bit" and number == 4:
                message = message.clone()
                message.view(-1)[5] += 1.0
            if self.fault == "activation not finite" and number == 3:
                message = message * float("nan")
            if self.fault == "activations overtake":
                if number == 2:
                    self.held = message
                    return
                if number == 3:
                    self.exchange(self.rank + 1, send=message)
                    assert self.held is not None, "held when number 2 was to be sent"
                    message = self.held
        self.exchange(self.rank + 1, send=message)

    def receive_backward(self) -> Tensor | None:
        if self.rank == self.last:
            return None
        made: Tensor = self.exchange(self.rank + 1, receive=True)
        return made

    def send_backward(self, gradient: Tensor | None) -> None:
        if self.rank == 0 or gradient is None:
            return
        number, self.sent_backward = self.sent_backward, self.sent_backward + 1
        if self.rank == 2:
            if self.fault == "gradient halved on its way":
                gradient = gradient * 0.5
            if self.fault == "one gradient is zero" and number == 1:
                gradient = torch.zeros_like(gradient)
        self.exchange(self.rank - 1, send=gradient)

    def finish(self) -> None:
        for works, _ in self.pending:
            for work in works:
                work.wait()


class MainGradients:
    """Every parameter's ``main_grad`` is a view of one flat fp32 buffer, to which its ``grad`` is added."""

    def __init__(self, module: nn.Module, fault: str) -> None:
        self.parameters, self.fault, self.rank = list(module.parameters()), fault, dist.get_rank()
        self.flat = torch.zeros(sum(p.numel() for p in self.parameters))
        parts = self.flat.split([p.numel() for p in self.parameters])
        self.views = [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]
        self.done = 0
        if fault == "buffer of weights" and self.rank == 1:
            self.flat.copy_(torch.cat([p.detach().flatten() for p in self.parameters]))

    def add(self) -> None:
        """Take the gradients of one microbatch."""
        number, self.done = self.done, self.done + 1
        for view, parameter in zip(self.views, self.parameters, strict=True):
            if parameter.grad is None:
                continue
            if self.fault == "copied, not added" and self.rank == 1:
                view.copy_(parameter.grad)
            elif not (self.fault == "first not added" and self.rank == 1 and number == 0):
                view.add_(parameter.grad)
            if self.fault == "fifth added twice" and self.rank == 2 and number == 5:
                view.add_(parameter.grad)
            parameter.grad = None

    def finish(self) -> None:
        """The sums become the gradients."""
        if self.fault == "norms reduced twice" and self.rank == 2:
            for view, parameter in zip(self.views, self.parameters, strict=True):
                if parameter is self.parameters[0]:
                    view.mul_(2)
        if self.fault == "flat buffer off by one" and self.rank == 1:
            self.views[3].copy_(self.views[3].roll(1))
        if self.fault == "stage negated" and self.rank == 2:
            self.flat.neg_()
        for view, parameter in zip(self.views, self.parameters, strict=True):
            parameter.grad = view
        if self.fault == "bias left out" and self.rank == 1:
            self.parameters[3].grad = None


class Loop:
    """1F1B without interleaving."""

    def __init__(self, module: nn.Module, iterator: Iterator[Any], count: int, like: Tensor, *, fault: str) -> None:
        self.module, self.iterator, self.count, self.fault = module, iterator, count, fault
        self.link, self.main = Communicator(like, fault), MainGradients(module, fault)
        self.rank, self.last = self.link.rank, self.link.last
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
        newest = self.fault == "queue popped at the wrong end" and self.rank == 1
        given, output = self.inputs.pop(-1 if newest else 0), self.outputs.pop(-1 if newest else 0)
        output.backward(self.link.receive_backward())
        self.main.add()
        self.link.send_backward(None if given is None else given.grad)

    def run(self) -> list[Tensor]:
        warm_up = min(self.last - self.rank, self.count)
        for _ in range(warm_up):
            self.forward_step()
        for _ in range(self.count - warm_up):
            self.forward_step()
            self.backward_step()
        for _ in range(warm_up):
            self.backward_step()
        self.link.finish()
        self.main.finish()
        return self.losses[::-1] if self.fault == "losses last first" else self.losses


def _norm(module: nn.Module, fault: str) -> Tensor:
    own = squares([module])
    if fault == "norm of each rank":
        return own.sqrt()
    if fault == "norms added":
        own = own.sqrt()
    dist.all_reduce(own)
    return own if fault == "norms added" else own.sqrt()


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
    losses = Loop(stage, iter(given), len(given), given[0][0], fault=fault).run()
    return stage, losses or None, _norm(module, fault)
