"""A training step by hand, beside the whole model on one device.

It runs as it is: a toy model, and a GPipe on two ranks. Change what is marked CHANGE; the rest may stay.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import watch
from pipeproof.whitebox import WhiteBox

loss_fn = nn.functional.mse_loss


def build_model() -> nn.Sequential:
    """CHANGE 1: the whole model. Two calls must give the same weights."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))


def microbatches() -> list[tuple[Tensor, Tensor]]:
    """CHANGE 2: the data, as (inputs, target) of each microbatch."""
    torch.manual_seed(1)
    return [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(6)]


def my_step(model: nn.Sequential, microbatches: list[tuple[Tensor, Tensor]]) -> tuple[nn.Module, list[Tensor]]:
    """CHANGE 3: your step, which runs on every rank.

    It hands back this rank's modules and, where they are known, the losses.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    stage = watch(model[2 * rank : 2 * rank + 2])  # may be left out; with it, the place of a fault is known
    done, losses = [], []
    for x, target in microbatches:
        if rank > 0:
            x = torch.empty_like(x)
            dist.recv(x, rank - 1)
        y = stage(x.requires_grad_(rank > 0))
        if rank < last:
            dist.send(y.detach(), rank + 1)
        else:
            loss = loss_fn(y, target)
            losses.append(loss.detach())
            y = loss / len(microbatches)  # so that the gradient is that of the mean
        done.append((x, y))
    for x, y in done:
        gradient = None
        if rank < last:
            gradient = torch.empty_like(y)
            dist.recv(gradient, rank + 1)
        y.backward(gradient)
        if rank > 0:
            assert x.grad is not None, "the backward came as far as the input"
            dist.send(x.grad, rank - 1)
    return stage, losses


def test_my_pipeline(whitebox: WhiteBox) -> None:
    """Fails, with the cause, where a loss or a gradient is not the whole model's."""
    verdict = whitebox.validate(my_step, reference=build_model, microbatches=microbatches(), ranks=2, loss_fn=loss_fn)
    verdict.raise_if_failed()
