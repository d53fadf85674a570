"""Steps that are checked beside the model on one device: torchrun --nproc-per-node 2 tests/examples/checked_step.py"""

import torch
import torch.distributed as dist
from torch import nn

from pipeproof import PipelineSchedule, SingleDevice, check_step


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))


dist.init_process_group("gloo")
first, loss_fn = 2 * dist.get_rank(), nn.functional.mse_loss
stage = build()[first : first + 2]  # a slice keeps the names of the whole
optimizer = torch.optim.SGD(stage.parameters(), lr=0.5)
schedule = PipelineSchedule(kind="1F1B", n_microbatches=4, stages=[stage], loss_fn=loss_fn, optimizer=optimizer)
draw = torch.Generator().manual_seed(0)
microbatches = [(torch.randn(8, 16, generator=draw), torch.zeros(8, 16)) for _ in range(4)]
for _ in range(3):
    with check_step(stage, microbatches, against=SingleDevice(build, loss_fn)) as check:
        result = schedule.wrap(check.wrap).train_step(microbatches, max_norm=0.1)
        check.report(losses=result.losses, loss=result.loss, norm=result.grad_norm)
    check.verdict.raise_if_failed()
if dist.get_rank() == 0:
    print(check.verdict)
dist.destroy_process_group()
