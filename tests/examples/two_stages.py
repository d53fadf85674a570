"""A pipeline of one's own, in the fewest lines: torchrun --nproc-per-node 2 tests/examples/two_stages.py"""

import torch
import torch.distributed as dist
from torch import nn

from pipeproof import PipelineSchedule

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
stage = nn.Sequential(nn.Linear(16, 16), nn.Tanh())  # this rank's part of the model

schedule = PipelineSchedule(
    kind="1F1B",
    n_microbatches=4,
    stages=[stage],
    loss_fn=nn.functional.mse_loss,
    optimizer=torch.optim.SGD(stage.parameters(), lr=0.5),
)
draw = torch.Generator().manual_seed(0)  # every rank passes the same microbatches
microbatches = [(torch.randn(8, 16, generator=draw), torch.zeros(8, 16)) for _ in range(4)]
for _ in range(3):
    result = schedule.train_step(microbatches, max_norm=1.0)  # forward, backward, norm, clip, step
    if dist.get_rank() == 0:
        print(f"loss {result.loss:.4f}, gradient norm {result.grad_norm:.4f}")
dist.destroy_process_group()
