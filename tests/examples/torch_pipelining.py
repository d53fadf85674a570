"""A user of ``torch.distributed.pipelining``: one stage on each rank, 1F1B. ``fault`` plants a bug."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B


def train(
    stage: nn.Module, microbatches: list[Any], loss_fn: Callable[..., Tensor], *, fault: str = ""
) -> list[Tensor]:
    """One step; the losses, on the last rank."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    inputs, targets = (torch.cat(tensors) for tensors in zip(*microbatches, strict=True))
    runtime = PipelineStage(stage, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(runtime, len(microbatches), loss_fn, scale_grads=fault != "unscaled")
    losses: list[Tensor] = []
    arguments = (inputs,) if rank == 0 else ()
    schedule.step(*arguments, target=targets if rank == ranks - 1 else None, losses=losses)
    return losses
