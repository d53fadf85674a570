"""A user of torch.distributed.pipelining, whose step costs pipeproof one line."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

from pipeproof.foreign import WhiteBox, torch_pipelining

loss_fn = nn.functional.mse_loss


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)))


def my_step(model: nn.Sequential, microbatches: list[Any]) -> Any:
    stages = [
        PipelineStage(model[2 * index : 2 * index + 2], index, 4, torch.device("cpu"))
        for index in (dist.get_rank(), dist.get_rank() + 2)
    ]
    schedule = ScheduleInterleavedZeroBubble(stages, len(microbatches), loss_fn)
    return torch_pipelining.step(schedule, microbatches)  # in place of schedule.step(...)


def test_a_torch_pipeline(whitebox: WhiteBox) -> None:
    torch.manual_seed(1)
    microbatches = [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(6)]
    verdict = whitebox.validate(my_step, reference=build_model, microbatches=microbatches, ranks=2, loss_fn=loss_fn)
    verdict.raise_if_failed()
