"""README's example of judging a training step of one's own."""

import torch
import torch.distributed as dist
from hand_written_1f1b import OneFOneB
from torch import nn

from pipeproof.foreign import WhiteBox, watch

loss_fn = nn.functional.mse_loss


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)))


def my_step(model: nn.Sequential, microbatches: list) -> tuple:
    stage = watch(model[2 * dist.get_rank() : 2 * dist.get_rank() + 2])
    losses = OneFOneB(stage, microbatches, loss_fn).step()
    return stage, losses


def test_my_pipeline(whitebox: WhiteBox) -> None:
    torch.manual_seed(1)
    microbatches = [(torch.randn(8, 16), torch.randn(8, 16)) for _ in range(6)]
    verdict = whitebox.validate(my_step, reference=build_model, microbatches=microbatches, ranks=4, loss_fn=loss_fn)
    verdict.raise_if_failed()
