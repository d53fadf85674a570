"""All forwards, then all backwards, by hand on ``torch.distributed``; what backwards need waits in lists.

``fault`` plants a bug on rank 1, to see it caught: each pairs tensors that are right, and arrived right, wrongly.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]
FAULTS = (
    "last-in-first-out",
    "gradients-turned",
    "all-gradients-turned",
    "unpopped-gradient",
    "unpopped-stash",
    "inputs-turned",
    "unpopped-input",
    "targets-turned",
)


def receive_all(microbatches: list[Any], peer: int) -> list[Tensor]:
    """One message for each microbatch, in order."""
    received = [torch.empty_like(x) for x, _ in microbatches]
    for buffer in received:
        dist.recv(buffer, peer)
    return received


def send_all(tensors: list[Tensor], peer: int) -> None:
    for work in [dist.isend(tensor, peer) for tensor in tensors]:
        work.wait()


def step(stage: nn.Module, microbatches: list[Any], loss_fn: Loss, *, fault: str = "") -> list[Tensor]:
    """One step of a pipeline of one stage per rank; the losses, on the last rank."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    fault = fault if rank == 1 or (fault == "targets-turned" and rank == last) else ""
    targets = [target for _, target in microbatches]
    inputs = [x for x, _ in microbatches]
    if rank > 0:
        inputs = [x.requires_grad_() for x in receive_all(microbatches, rank - 1)]
    if fault == "inputs-turned":
        inputs[1], inputs[2] = inputs[2], inputs[1]
    if fault == "unpopped-input":
        inputs[2] = inputs[1].detach().clone().requires_grad_()
    if fault == "targets-turned":
        targets[1], targets[2] = targets[2], targets[1]
    outputs = [stage(x) for x in inputs]
    losses: list[Tensor] = []
    if rank == last:
        losses = [loss_fn(y, target) for y, target in zip(outputs, targets, strict=True)]
        gradients = [torch.tensor(1 / len(losses)) for _ in losses]
    else:
        send_all([y.detach() for y in outputs], rank + 1)
        gradients = receive_all(microbatches, rank + 1)
    live = list(zip(inputs, losses or outputs, strict=True))
    if fault == "last-in-first-out":
        live.reverse()
    if fault == "gradients-turned":
        gradients[1:4] = [gradients[2], gradients[3], gradients[1]]
    if fault == "all-gradients-turned":
        gradients[:5] = [gradients[k] for k in (1, 2, 0, 4, 3)]
    if fault == "unpopped-gradient":
        gradients[2] = gradients[1]
    handed = []
    for k, (x, y) in enumerate(live):
        if fault == "unpopped-stash" and k == 2:
            x, y = live[1]
        x.grad = None
        y.backward(gradients[k], retain_graph=True)
        handed.append(x.grad)
    if rank > 0:
        send_all([gradient for gradient in handed if gradient is not None], rank - 1)
    return [loss.detach() for loss in losses]
