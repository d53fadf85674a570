"""Your model in pipeproof's own PipelineSchedule, beside the whole model on one device.

It runs as it is: a toy model, and 1F1B on two ranks. Change what is marked CHANGE; the rest may stay.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeproof import watch
from pipeproof.pipeline import PipelineSchedule
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


def my_step(
    model: nn.Sequential, microbatches: list[tuple[Tensor, Tensor]]
) -> tuple[nn.Module, tuple[float, ...], float | None]:
    """CHANGE 3: your stages and your schedule. This runs on every rank; "pipeproof show" draws all kinds."""
    rank = dist.get_rank()
    stage = watch(model[2 * rank : 2 * rank + 2])  # may be left out; with it, the place of a fault is known
    schedule = PipelineSchedule(kind="1F1B", n_microbatches=len(microbatches), stages=[stage], loss_fn=loss_fn)
    result = schedule.train_step(microbatches)
    return stage, result.losses, result.grad_norm


def test_my_pipeline(whitebox: WhiteBox) -> None:
    """Fails, with the cause, where a loss or a gradient is not the whole model's."""
    verdict = whitebox.validate(my_step, reference=build_model, microbatches=microbatches(), ranks=2, loss_fn=loss_fn)
    verdict.raise_if_failed()
