"""1F1B by hand on ``torch.distributed``: isend, irecv and a loop. ``fault`` plants a bug, to see it caught.

Messages cross: where sends wait for their receives and a pair has one queue, as NCCL may do it, it hangs.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]


class OneFOneB:
    """One step of a pipeline of one stage per rank; activations have the shape of the inputs."""

    def __init__(self, stage: nn.Module, microbatches: list[Any], loss_fn: Loss, *, fault: str = "") -> None:
        self.stage, self.microbatches, self.loss_fn, self.fault = stage, microbatches, loss_fn, fault
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        self.live: list[tuple[Tensor, Tensor]] = []  # inputs and outputs whose backward is to come
        self.losses: list[Tensor] = []
        self.sending: list[Any] = []
        self.buffer = torch.empty_like(microbatches[0][0])

    def step(self) -> list[Tensor]:
        """All forwards and backwards; the losses, on the last rank."""
        count = len(self.microbatches)
        warm_up = min(self.last - self.rank, count)
        for m in range(warm_up):
            self.forward(m)
        for m in range(warm_up, count):
            self.forward(m)
            self.backward()
        for _ in range(warm_up):
            self.backward()
        for work, _ in self.sending:
            work.wait()
        return self.losses

    def forward(self, m: int) -> None:
        inputs, target = self.microbatches[m]
        x = inputs if self.rank == 0 else self.receive(self.rank - 1).requires_grad_()
        y = self.stage(x)
        if self.rank == self.last:
            loss = self.loss_fn(y, target)
            self.losses.append(loss.detach())
            y = loss / len(self.microbatches)
        else:
            self.send(y.detach(), self.rank + 1)
        self.live.append((x, y))

    def backward(self) -> None:
        x, y = self.live.pop(0)
        y.backward(None if self.rank == self.last else self.receive(self.rank + 1))
        if self.rank > 0:
            assert x.grad is not None
            self.send(x.grad, self.rank - 1)

    def send(self, tensor: Tensor, peer: int) -> None:
        self.sending.append((dist.isend(tensor, peer), tensor))  # a tensor must live until it is sent

    def receive(self, peer: int) -> Tensor:
        reused = self.fault == "one-buffer" and peer < self.rank  # also for what the backward still needs
        buffer = self.buffer.detach() if reused else torch.empty_like(self.buffer)
        dist.irecv(buffer, peer).wait()
        return buffer
