"""A zero-bubble loop with a store of weight gradients: linear layers put them off until W. ``fault`` plants a bug.

Messages cross: where sends wait for their receives and a pair has one queue, as NCCL may do it, it hangs.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class WeightGradStore:
    """Work that backwards have put off, by microbatch, first in first out."""

    def __init__(self) -> None:
        self.cache: list[Callable[[], None]] = []
        self.queue: deque[list[Callable[[], None]]] = deque()

    def flush(self) -> None:
        """All that was put since the last time belongs to one microbatch."""
        self.queue.append(self.cache)
        self.cache = []

    def pop(self) -> None:
        """Do the work of the oldest microbatch."""
        for work in self.queue.popleft():
            work()


class _Linear(torch.autograd.Function):
    """x W^T + b whose backward gives x's gradient and puts W's and b's into the store."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, layer: "StoredLinear") -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return x @ layer.weight.detach().T + layer.bias.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (x,), layer = ctx.saved_tensors, ctx.layer
        layer.store.cache.append(lambda: layer.add(gradient.T @ x, gradient.sum(0)))
        return gradient @ layer.weight, None, None


class StoredLinear(nn.Module):
    """A linear layer that computes with the weights of ``linear`` and writes their gradients itself."""

    def __init__(self, linear: nn.Linear, store: WeightGradStore) -> None:
        super().__init__()
        self.weight, self.bias, self.store = linear.weight, linear.bias, store

    def forward(self, x: Tensor) -> Tensor:
        anchor = torch.zeros((), requires_grad=True)  # so that a backward comes also where x wants no gradient
        return _Linear.apply(x, anchor, self)

    def add(self, weight: Tensor, bias: Tensor) -> None:
        for parameter, gradient in ((self.weight, weight), (self.bias, bias)):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def zero_bubble(
    stage: nn.Module,
    store: WeightGradStore,
    microbatches: list[Any],
    loss_fn: Callable[..., Tensor],
    *,
    fault: str = "",
) -> list[Tensor]:
    """ZB-H1: rank r does W of a microbatch r microbatches after its backward; the losses, on the last rank."""
    rank, last, count = dist.get_rank(), dist.get_world_size() - 1, len(microbatches)
    live: deque[tuple[Tensor, Tensor]] = deque()
    losses, sending = list[Tensor](), list[Any]()

    def receive(peer: int, like: Tensor) -> Tensor:
        tensor = torch.empty_like(like)
        dist.recv(tensor, peer)
        return tensor

    def forward(m: int) -> None:
        x, target = microbatches[m]
        x = x if rank == 0 else receive(rank - 1, x).requires_grad_()
        y = stage(x)
        if rank == last:
            losses.append(loss_fn(y, target))
            y = losses[-1] / count
        else:
            sending.append((dist.isend(y.detach(), rank + 1), y))
        live.append((x, y))

    def backward() -> None:
        x, y = live.popleft()
        y.backward(None if rank == last else receive(rank + 1, y))
        store.flush()
        if x.grad is not None:
            sending.append((dist.isend(x.grad, rank - 1), x.grad))
        if len(store.queue) > rank:
            store.pop()

    warm_up = min(last - rank, count)
    for m in range(warm_up):
        forward(m)
    for m in range(warm_up, count):
        forward(m)
        backward()
    for _ in range(warm_up):
        backward()
    while store.queue and fault != "no-last-flush":
        store.pop()
    for work, _ in sending:
        work.wait()
    return [loss.detach() for loss in losses]
