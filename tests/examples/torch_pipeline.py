"""README's example of a user of torch.distributed.pipelining: a step of theirs, and what pipeproof needs of it."""

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

from validation.whitebox import torch_pipelining


def my_step(model: nn.Sequential, microbatches: list[Any]) -> Any:
    rank, ranks, virtual = dist.get_rank(), dist.get_world_size(), 2
    stages = [
        PipelineStage(model[2 * index : 2 * index + 2], index, ranks * virtual, next(model.parameters()).device)
        for index in range(rank, ranks * virtual, ranks)
    ]
    schedule = ScheduleInterleavedZeroBubble(stages, len(microbatches), loss_fn=nn.functional.mse_loss)
    return torch_pipelining.step(schedule, microbatches)  # in place of schedule.step(...)
