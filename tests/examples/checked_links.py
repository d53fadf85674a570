"""A step that is held against itself, link by link: torchrun --nproc-per-node 2 tests/examples/checked_links.py"""

import torch
import torch.distributed as dist
from torch import nn

from pipeproof import Contract, PipelineSchedule, StageByStage, check_step


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))


dist.init_process_group("gloo")
rank, loss_fn = dist.get_rank(), nn.functional.mse_loss
stage = build()[2 * rank : 2 * rank + 2]  # a slice keeps the names of the whole
optimizer = torch.optim.SGD(stage.parameters(), lr=0.5)
schedule = PipelineSchedule(kind="1F1B", n_microbatches=4, stages=[stage], loss_fn=loss_fn, optimizer=optimizer)
draw = torch.Generator().manual_seed(0)
microbatches = [(torch.randn(8, 16, generator=draw), torch.zeros(8, 16)) for _ in range(4)]
by = StageByStage(loss_fn, optimizer=optimizer, contract=Contract(max_norm=0.1))
with check_step(stage, microbatches, against=by) as check:
    result = schedule.wrap(check.wrap).train_step(microbatches, max_norm=0.1)
    check.report(losses=result.losses, loss=result.loss, norm=result.grad_norm)
if rank == 0:
    print(check.verdict)
dist.destroy_process_group()
