"""1F1B by hand: one stage on each rank, with isend, recv and a loop."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

loss_fn = nn.functional.mse_loss


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))


class OneFOneB:
    def __init__(self, stage: nn.Module, microbatches: list[tuple[Tensor, Tensor]]) -> None:
        self.stage, self.microbatches = stage, microbatches
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        self.live: list[tuple[Tensor, Tensor]] = []  # inputs and outputs whose backward is to come
        self.losses: list[Tensor] = []
        self.sent: list[tuple] = []  # a tensor must live until it is sent

    def step(self) -> list[Tensor]:
        ahead = min(self.last - self.rank, len(self.microbatches))
        for m in range(len(self.microbatches)):
            self.forward(m)
            if m >= ahead:
                self.backward()
        for _ in range(ahead):
            self.backward()
        for work, _ in self.sent:
            work.wait()
        return self.losses

    def forward(self, m: int) -> None:
        x, target = self.microbatches[m]
        if self.rank > 0:
            x = self.receive(self.rank - 1, x).requires_grad_()
        y = self.stage(x)
        if self.rank < self.last:
            self.send(y.detach(), self.rank + 1)
        else:
            self.losses.append(loss_fn(y, target))
            y = self.losses[-1] / len(self.microbatches)
        self.live.append((x, y))

    def backward(self) -> None:
        x, y = self.live.pop(0)
        y.backward(self.receive(self.rank + 1, y) if self.rank < self.last else None)
        if self.rank > 0:
            self.send(x.grad, self.rank - 1)

    def send(self, tensor: Tensor, peer: int) -> None:
        self.sent.append((dist.isend(tensor, peer), tensor))

    def receive(self, peer: int, like: Tensor) -> Tensor:
        buffer = torch.empty_like(like)
        dist.recv(buffer, peer)
        return buffer
